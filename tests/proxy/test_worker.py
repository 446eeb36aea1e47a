"""What a worker tells the ledger beside its requests: once, and never in the way of following the change feed."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from sqlalchemy import text

from ledger.database import Database
from ledger.deployments import failures_of
from proxy.settings import Settings, Storage
from proxy.worker import Worker
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream


async def test_failures_are_counted_once_though_what_follows_fails(ledger_sqlite_url: str, tmp_path: Path) -> None:
    storage = Storage(database=ledger_sqlite_url, journal_dir=str(tmp_path))
    worker = Worker(Settings(storage=storage), 0)
    worker.db = db = await Database.open(ledger_sqlite_url)
    try:
        async with db.begin() as c:
            await c.execute(text("ALTER TABLE acceptance_states RENAME TO away"))
        worker.metrics.upstream_failed("m", "a", "broken")
        for _ in range(2):
            await worker._exchange()
        async with db.read() as c:
            assert await failures_of(c, "m") == {"a": 1}
    finally:
        await worker.close()


def test_a_writer_that_waits_for_another_keeps_no_change_from_being_seen(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    config = configuration({"a": upstream.base_url}, m={"deployments": [{"to": "a", "model": "gpt-4"}], "price": PRICE})
    with Gateway(tmp_path, config) as gateway:
        worker = gateway.app.state.worker
        file = gateway.settings.storage.database.removeprefix("sqlite:///")
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            worker.metrics.upstream_failed("m", "a", "broken")
            time.sleep(4.5)  # the failure is to be written by now
            seen_s = time.monotonic() - worker._refreshed_at
            other.execute("ROLLBACK")
        assert seen_s < 3.5
