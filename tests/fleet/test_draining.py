"""What becomes of a long stream when its worker is told to stop, and when its worker is replaced."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.hosts import Fleet, Host
from tests.fleet.load import BODY
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

DELAY_S = 0.2
"""Between two tokens."""
MANY = 2_000
"""More than a test waits for."""


class Stream:
    """A client that reads so many tokens, as slowly as they come."""

    def __init__(self, host: Host, key: str, tokens: int) -> None:
        self.deltas = 0
        self.done_at: float | None = None
        """When the stream came to its proper end."""
        self.error: dict[str, Any] | None = None
        self._host, self._key, self._tokens = host, key, tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: self.deltas > 0, 30, f"the first token\n{host.logs()}")

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        fault = {"tokens": self._tokens, "chunk_delay_ms": int(DELAY_S * 1_000)}
        body = {**BODY, "stream": True, "max_tokens": self._tokens, "x_fault": fault}
        headers = {"authorization": f"Bearer {self._key}"}
        try:
            with httpx.stream("POST", f"{self._host.url}/v1/chat/completions", json=body, headers=headers) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done_at = time.monotonic()
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        self.error = event.get("error")
                        self.deltas += any(choice["delta"].get("content") for choice in event.get("choices", []))
        except httpx.TransportError:  # it was cut
            return


@pytest.fixture
def host(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Callable[[int], Host]]:
    """One of one worker, with this drain_s."""
    started: list[Host] = []

    def start(drain_s: int) -> Host:
        server = {"workers": 1, "drain_s": drain_s}
        one = Host(tmp_path, "sqlite:///data/tallygate.db", "memory", upstream.base_url, server=server)
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.close()


def test_a_stop_lets_a_stream_finish_that_needs_less_than_drain_s(host: Callable[[int], Host]) -> None:
    one = host(60)
    stream = Stream(one, Fleet([one]).new_key(), tokens=50)
    asked = time.monotonic()
    assert one.stop(90) == 0
    stream.join()
    assert stream.done_at is not None, one.logs()
    assert stream.done_at - asked > 5, "it was no long stream"
    assert stream.deltas == 50


def test_a_replaced_worker_goes_on_with_its_stream_past_drain_s_and_a_stop_cuts_and_bills_it(
    host: Callable[[int], Host],
) -> None:
    one = host(1)
    key = Fleet([one]).new_key()
    stream = Stream(one, key, tokens=MANY)
    one.roll()
    at_roll = stream.deltas
    body, headers = {**BODY, "max_tokens": 3}, {"authorization": f"Bearer {key}"}
    served = httpx.post(f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert served.status_code == 200, one.logs()
    past_drain_s = at_roll + 3 / DELAY_S
    wait_until(lambda: stream.deltas > past_drain_s, 60, f"more of the stream\n{one.logs()}")

    assert one.stop(60) == 0
    stream.join()
    assert stream.done_at is None
    assert stream.error is not None
    assert (stream.error["code"], "another" in stream.error["message"]) == ("shutting_down", False)
    logged = "".join(path.read_text() for path in (one.folder / "data/logs").glob("gateway-*.log"))
    assert "request_cut" in logged
    assert "Traceback" not in logged
    assert "Exception in ASGI" not in logged
    command = [*one.command[:4], "usage", "--json", *one.options]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["data"]
    (cut,) = [row for row in rows if row["status"] == "cancelled"]
    assert len(rows) == 2
    assert stream.deltas <= cut["generated_tokens"] < MANY
    assert Fleet([one]).verify(one)["ok"]
