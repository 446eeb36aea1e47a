"""An administrator sees what webhooks have not taken, and has it told again."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from ledger import audit, outbox
from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict, NotFound
from ledger.schema import webhook_deliveries
from proxy.settings import Webhook
from proxy.webhooks import Courier, hook_id
from tests.conftest import run_apart
from tests.operator.conftest import Admin
from tests.operator.test_cli import Run, tallygate  # noqa: F401
from tests.operator.test_webhooks import NOW_MS, Receiver, receiver  # noqa: F401


@pytest.fixture
async def db(ledger_url: str) -> AsyncIterator[Database]:
    database = await Database.open(ledger_url)
    yield database
    await database.close()


async def deliver(db: Database, receiver: Receiver, now_ms: int) -> None:  # noqa: F811
    courier = Courier(db, [Webhook(url=receiver.url)], clock=lambda: now_ms)
    async with httpx.AsyncClient() as client:
        await courier.deliver_once(client)


async def listed(db: Database, state: outbox.State | None = None) -> list[outbox.DeliveryState]:
    async with db.read() as c:
        return (await outbox.list_deliveries(c, state=state)).items


async def test_what_was_given_up_is_told_again_when_an_administrator_asks(
    db: Database,
    receiver: Receiver,  # noqa: F811
) -> None:
    receiver.statuses = [500, 503]
    async with db.begin() as c:
        await outbox.record_event(c, "budget", "a", {"percent": 80}, NOW_MS)
    await deliver(db, receiver, NOW_MS)
    (waiting,) = await listed(db)
    assert (waiting.state, waiting.attempts, waiting.error) == ("waiting", 1, "HTTP 500")
    async with db.begin() as c:
        await c.execute(update(webhook_deliveries).values(attempts=outbox.GIVE_UP_AFTER - 1))
    later = NOW_MS + outbox.LONGEST_PAUSE_MS
    await deliver(db, receiver, later)
    (given_up,) = await listed(db, "given_up")
    assert (given_up.attempts, given_up.error, given_up.done_ms) == (outbox.GIVE_UP_AFTER, "HTTP 503", later)
    await deliver(db, receiver, later + outbox.LONGEST_PAUSE_MS)
    assert len(receiver.got) == 2

    by = By("cli:ops", later + 1, "their server is back")
    async with db.begin() as c:
        (again,) = await outbox.retry(c, by, given_up.event_id)
    assert (again.state, again.attempts, again.next_ms, again.done_ms) == ("waiting", 0, later + 1, None)
    await deliver(db, receiver, later + 1)
    assert len(receiver.got) == 3
    (done,) = await listed(db, "delivered")
    assert (done.attempts, done.error) == (1, None)
    async with db.read() as c:
        (entry,) = (await audit.list_entries(c, subject_id=given_up.event_id)).items
    assert (entry.actor, entry.action, entry.reason) == (by.actor, "retry", by.reason)
    async with db.begin() as c:
        with pytest.raises(Conflict, match="was delivered to every webhook"):
            await outbox.retry(c, by, given_up.event_id)
        with pytest.raises(NotFound):
            await outbox.retry(c, by, "event_unknown")


HOOK = Webhook(url="https://ops.example.com/hook/secret-in-its-path")


def two_waiting(admin: Admin) -> list[str]:
    """Events that a webhook has still to hear of."""

    async def make() -> list[str]:
        db = await Database.open(admin.settings.storage.database)
        async with db.begin() as c:
            for key in ("a", "b"):
                await outbox.record_event(c, "budget", key, {}, NOW_MS)
            await outbox.route(c, {hook_id(HOOK): HOOK.events}, NOW_MS)
        found = [item.event_id for item in await listed(db)]
        await db.close()
        return found

    return run_apart(make)


def test_the_admin_api_lists_deliveries_in_pages_and_only_administrators_retry(admin: Admin) -> None:
    newest, oldest = two_waiting(admin)
    first = admin.client.get("/webhook-deliveries", params={"limit": 1}).json()
    second = admin.client.get("/webhook-deliveries", params={"limit": 1, "cursor": first["next_cursor"]}).json()
    assert [page["data"][0]["event_id"] for page in (first, second)] == [newest, oldest]
    assert second["next_cursor"] is None
    told = first["data"][0]
    assert (told["type"], told["state"], told["attempts"], told["last_error"]) == ("budget", "waiting", 0, None)
    assert told["webhook"] is None, "this server has no webhook any more"
    assert admin.client.get("/webhook-deliveries", params={"state": "given_up"}).json()["data"] == []
    assert admin.client.get("/webhook-deliveries", params={"state": "lost"}).status_code == 400
    retried = admin.client.post("/webhook-deliveries/retry", json={"event_id": newest})
    assert [item["event_id"] for item in retried.json()["data"]] == [newest]
    assert admin.client.post("/webhook-deliveries/retry", json={"event_id": "event_x"}).status_code == 404
    made = admin.client.post("/admin-tokens", json={"name": "eyes", "role": "viewer"}).json()
    with admin.with_token(made["token"]) as viewer:
        assert len(viewer.get("/webhook-deliveries").json()["data"]) == 2
        assert viewer.post("/webhook-deliveries/retry", json={"event_id": newest}).status_code == 403


def test_the_shell_names_a_webhook_by_its_host_alone(
    admin: Admin,
    base_dir: Path,
    tallygate: Run,  # noqa: F811
) -> None:
    newest, _ = two_waiting(admin)
    config = base_dir / "tallygate.yaml"
    config.write_text(json.dumps({"webhooks": [{"url": HOOK.url}]}))
    found = tallygate("webhook", "list", "--json", "--config", str(config)).json["data"]
    assert {item["webhook"] for item in found} == {"ops.example.com"}
    assert "secret" not in json.dumps(found)
    shown = tallygate("webhook", "retry", newest, "--reason", "again", "--config", str(config))
    assert (shown.code, shown.out.splitlines()[1].split("\t")[0]) == (0, newest)
    assert tallygate("webhook", "list", "--state", "lost").code == 2
