"""Promises about children: one that ends is started again, also when that failed for a while."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from proxy.processes import Child, Role


async def test_a_child_that_could_not_be_started_for_a_while_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.processes.FIRST_PAUSE_S", 0.05)
    said: list[str] = []
    place = tmp_path / "logs"
    child = Child(Role("child", (sys.executable, "-c", "pass"), place / "child.log"), said.append)
    child.start()
    watcher = asyncio.create_task(child.keep_running())
    await child.wait()
    (place / "child.log").unlink()
    place.rmdir()
    place.write_text("in the way")
    first = child.pid
    async with asyncio.timeout(60):
        while not any("cannot be started" in line for line in said):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        place.unlink()
        while child.pid == first:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    child.leave_ended()
    await asyncio.wait_for(watcher, 60)
