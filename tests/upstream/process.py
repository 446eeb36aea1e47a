"""The fake provider as a process of its own, and its log as an oracle."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.services import Served, free_port, own_folder, wait_until


class FakeUpstream(Served):
    """`base_url` is what a configuration names; `entries()` is what really was produced."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self._folder = own_folder("upstream")
        self._log = self._folder / "log.jsonl"
        self._read_from, self._reset_at = 0, 0.0
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "tests.upstream",
            "--port",
            str(self.port),
            "--log",
            self._log,
            *options,
        ]
        super().__init__(command, ready=f"http://127.0.0.1:{self.port}/health")

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def standing_fault(self, fault: str | dict[str, Any] | None, times: int = -1) -> None:
        """Let the next `times` requests (-1: all) that name no fault meet this one; None ends it."""
        self._control({"fault": fault, "times": times})

    def health(self, status: int) -> None:
        """What `/health` answers until `reset`."""
        self._control({"health": status})

    def _control(self, wanted: dict[str, Any]) -> Any:
        body = json.dumps(wanted).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/control", body, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def reset(self) -> None:
        """Forget every request that has begun so far, also those that end later, and any standing fault."""
        self._read_from = self._control({"fault": None})["logged_bytes"]
        self._reset_at = time.monotonic()

    def entries(self) -> list[dict[str, Any]]:
        """One entry per finished request since `reset`, oldest first (see `server.Exchange.entry`)."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read_from)
            whole = log.read().split(b"\n")[:-1]  # it may be writing the last one
        entries = map(json.loads, whole)
        return [entry for entry in entries if entry["began"] > self._reset_at]

    def entry(self, request_id: str, timeout_s: float = 30) -> dict[str, Any]:
        """The newest entry whose `x-request-id` was this; waits for it. Raises TimeoutError."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [entry for entry in self.entries() if entry["id"] == request_id]
            return bool(found)

        wait_until(look, timeout_s, f"the provider's entry for {request_id}")
        return found[-1]

    def wait_for_entries(self, count: int, timeout_s: float = 30) -> list[dict[str, Any]]:
        """All entries once there are at least so many. Raises TimeoutError."""
        wait_until(lambda: len(self.entries()) >= count, timeout_s, f"{count} entries of the provider")
        return self.entries()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)
