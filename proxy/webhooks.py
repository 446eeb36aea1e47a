"""Delivers what the outbox holds to the configured webhooks: at least once, signed, again and again until it is taken.

A request carries `x-tallygate-timestamp` (seconds since 1970) and, where the webhook has a secret,
`x-tallygate-signature: v1=` HMAC-SHA256 in hex, under the secret, over the timestamp, a dot and the body as sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import httpx
import msgspec
import structlog

from ledger import outbox
from ledger.database import Database
from ledger.errors import LedgerUnavailable
from ledger.outbox import Delivery
from proxy.settings import Webhook

log = structlog.get_logger(__name__)

POLL_S = 1.0
TIMEOUT_S = 10.0
AT_ONCE = 8


class Courier:
    """`run` it beside the poster. Several on one database share the work. attempts: counted by what became of them."""

    def __init__(
        self,
        db: Database,
        hooks: Sequence[Webhook],
        attempts: Counter[str] | None = None,
        *,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._db = db
        self._attempts: Counter[str] = Counter() if attempts is None else attempts
        self._hooks = {hook_id(hook): hook for hook in hooks}
        self._clock = clock or (lambda: time.time_ns() // 1_000_000)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until told to stop; what is under way then is finished or tried again by the next one."""
        if not self._hooks:
            return
        async with httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False) as client:
            while not stop.is_set():
                busy = False
                try:
                    busy = await self.deliver_once(client)
                except LedgerUnavailable as error:
                    log.warning("webhooks wait for the database", error=str(error))
                except Exception as error:  # whatever it is, posting goes on beside us
                    log.error("webhooks_failed", exc_info=error)
                if not busy:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), POLL_S)

    async def deliver_once(self, client: httpx.AsyncClient) -> bool:
        """Whether there was anything to do."""
        wanted = {name: hook.events for name, hook in self._hooks.items()}
        async with self._db.begin() as c:
            routed = await outbox.route(c, wanted, self._clock())
            due = await outbox.claim(c, self._hooks, self._clock())
        await asyncio.gather(*(self._deliver(client, delivery) for delivery in due))
        return bool(routed or due)

    async def _deliver(self, client: httpx.AsyncClient, delivery: Delivery) -> None:
        async with self._places:
            error = await self._post(client, delivery)
        self._attempts["delivered" if error is None else "failed"] += 1
        if error is not None:
            log.warning("webhook_refused", event_id=delivery.event.id, attempts=delivery.attempts, error=error)
        async with self._db.begin() as c:
            await outbox.finish(c, delivery, error, self._clock())

    async def _post(self, client: httpx.AsyncClient, delivery: Delivery) -> str | None:
        """None when the webhook took it with a 2xx, else what went wrong."""
        hook, body = self._hooks[delivery.hook], body_of(delivery)
        headers = {
            "content-type": "application/json",
            "user-agent": "TallyGate",
            "x-tallygate-event": delivery.event.id,
        }
        headers |= signature_headers(hook.secret, self._clock() // 1_000, body)
        try:
            async with asyncio.timeout(TIMEOUT_S):  # httpx bounds each step, not their sum
                answer = await client.post(hook.url, content=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")
        return None if 200 <= answer.status_code < 300 else f"HTTP {answer.status_code}"


def hook_id(hook: Webhook) -> str:
    """By which the database knows a webhook; its URL may hold a secret."""
    return hashlib.sha256(hook.url.encode()).hexdigest()[:16]


def body_of(delivery: Delivery) -> bytes:
    event = delivery.event
    at = datetime.fromtimestamp(event.at_ms // 1_000, UTC).isoformat().replace("+00:00", "Z")
    return msgspec.json.encode({"id": event.id, "type": event.kind, "created_at": at, "data": event.payload})


def signature_headers(secret: str | None, timestamp_s: int, body: bytes) -> dict[str, str]:
    headers = {"x-tallygate-timestamp": str(timestamp_s)}
    if secret is not None:
        signed = hmac.digest(secret.encode(), b"%d." % timestamp_s + body, "sha256")
        headers["x-tallygate-signature"] = f"v1={signed.hex()}"
    return headers
