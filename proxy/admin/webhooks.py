"""What webhooks were told, what they have not taken yet, and why."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from ledger import outbox
from ledger.outbox import DeliveryState
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.times import iso, required_iso
from proxy.webhooks import hook_id


class DeliveryFilter(Paging, frozen=True, kw_only=True):
    state: Literal["waiting", "delivered", "given_up"] | None = None


class RetryBody(Strict, frozen=True, kw_only=True):
    event_id: Annotated[str, msgspec.Meta(min_length=1)]


class DeliveryAnswer(msgspec.Struct, frozen=True):
    """An event on its way to one webhook. `webhook`: the host of its URL, whose path may hold a secret; null where it
    is configured no more, and nothing is sent. `next_attempt_at`: null unless it waits."""

    event_id: str
    type: str
    webhook: str | None
    state: str
    attempts: int
    last_error: str | None
    happened_at: str
    next_attempt_at: str | None
    done_at: str | None


def _answer(call: Call, item: DeliveryState) -> DeliveryAnswer:
    hosts = {hook_id(hook): urlsplit(hook.url).hostname for hook in call.installation.settings.webhooks}
    next_ms = item.next_ms if item.state == "waiting" else None
    times = (required_iso(item.at_ms), iso(next_ms), iso(item.done_ms))
    return DeliveryAnswer(item.event_id, item.kind, hosts.get(item.hook), item.state, item.attempts, item.error, *times)


async def list_(call: Call) -> Listing[DeliveryAnswer]:
    query: DeliveryFilter = call.query
    found = await outbox.list_deliveries(call.c, state=query.state, cursor=query.cursor, limit=query.limit)
    return Listing([_answer(call, item) for item in found.items], found.next_cursor)


async def retry(call: Call) -> Listing[DeliveryAnswer]:
    """Every webhook that has not taken it is tried again at once."""
    body: RetryBody = call.body
    return Listing([_answer(call, item) for item in await outbox.retry(call.c, call.by, body.event_id)])


ENDPOINTS = [
    Endpoint(
        "GET",
        "/webhook-deliveries",
        "What webhooks are told, and why not yet",
        list_,
        Listing[DeliveryAnswer],
        EVERYONE,
        query=DeliveryFilter,
    ),
    Endpoint(
        "POST",
        "/webhook-deliveries/retry",
        "Tell an event again at once where it was not taken",
        retry,
        Listing[DeliveryAnswer],
        body=RetryBody,
    ),
]
