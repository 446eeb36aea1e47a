"""Every row of the table, against a served gateway and an upstream that answers with the row's bytes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ledger import keys, quotas
from ledger.audit import By
from ledger.keys import KeyHasher
from ledger.quotas import Limit, Scope
from proxy.secrets import key_secret
from proxy.upstream import Patience
from tests.conformance.rows import TABLE, Row
from tests.proxy.scripted import ScriptedUpstream, exchange
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until

HASTE = Patience(first_byte=0.5, total=0.5)
"""Only where the time has to run out: elsewhere a busy machine may take its time."""
ROWS = [pytest.param(row, id=f"{chapter}: {row.promise}") for chapter, rows in TABLE.items() for row in rows]


class Served:
    """The gateway, its upstream, and a key for each kind of client."""

    def __init__(self, gateway: Gateway, upstream: ScriptedUpstream) -> None:
        self.gateway, self.upstream = gateway, upstream
        new = gateway.new_key
        self.keys = {
            "good": gateway.key,
            "wrong": "sk-tg-wrong",
            "poor": new(money="0"),
            "expired": new(expires_at_ms=1),
            "elsewhere": new(allowed_ips=["10.0.0.0/8"]),
            "other models": new(models=["other"]),
            "blocked": new(),
            "limited": new(),
            "counted": new(),
        }
        gateway.ledger(self._limit)

    async def _limit(self, c: Any) -> None:
        hasher, by = KeyHasher(key_secret(self.gateway.settings)), By("test", time.time_ns() // 1_000_000)
        for name, limit in (("blocked", 0), ("limited", 1), ("counted", 5)):
            record = await keys.find_by_hash(c, hasher(self.keys[name]))
            assert record is not None
            if limit:
                await quotas.replace_quotas(c, by, Scope.of_key(record.key_id), [Limit("requests", "hour", limit)])
            else:
                await keys.block_key(c, by, record.key_id)

    def ask(self, row: Row, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body) as they came over the socket."""
        bearer = b"" if row.key is None else f"authorization: Bearer {self.keys[row.key]}\r\n".encode()
        return exchange(self.gateway.port, row.path, body, bearer + row.asks_with)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with ScriptedUpstream() as upstream:
        model = {"deployments": [{"to": "chat", "model": "gpt-4"}], "price": PRICE}
        rests = {"deployments": [{"to": "rests", "model": "gpt-4"}], "price": PRICE}
        config = configuration(
            {"chat": upstream.base_url, "rests": upstream.base_url},
            m=model,
            resting=rests,
            free={**model, "price": None},
        )
        config["server"] = {"max_body_mb": 1}
        with Gateway(tmp_path_factory.mktemp("conformance"), config) as gateway:
            yield Served(gateway, upstream)


@pytest.mark.parametrize("row", ROWS)
def test_promise(served: Served, row: Row) -> None:
    for deployment in served.gateway.app.state.worker.routes["m"].deployments:
        deployment.fitness.succeeded()
        deployment.fitness.busy_until_ms = 0
        deployment.upstream.patience = HASTE if row.status == 504 else Patience(first_byte=10, total=10)
    served.upstream.script = row.upstream
    for _ in range(row.before):
        served.ask(row, row.before_body or row.body)
    served.upstream.received.clear()
    if row.beside:
        threading.Thread(target=served.ask, args=(row, row.body)).start()
        wait_until(lambda: bool(served.upstream.received), 30, "the request beside")
    status, headers, answer = served.ask(row, row.body)
    assert (status, answer) == (row.status, Like(row.answer))
    assert {name: headers.get(name) for name in row.headers} == {
        name: None if value is None else Like(value.encode()) for name, value in row.headers.items()
    }
    assert headers["x-request-id"]
    if row.sent:
        assert row.sent in served.upstream.received[-1]
    if row.unasked:
        assert served.upstream.received == []


class Like:
    """Equal to whatever is the same but for what `<*>` stands for."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = pattern

    def __eq__(self, other: object) -> bool:
        data = other.encode() if isinstance(other, str) else other
        pattern = b".*".join(map(re.escape, self._pattern.split(b"<*>")))
        return isinstance(data, bytes) and re.fullmatch(pattern, data, re.DOTALL) is not None

    def __repr__(self) -> str:
        return repr(self._pattern)
