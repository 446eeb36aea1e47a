"""Ends a worker with os._exit at each of its system calls and SQL steps in turn; the next one finds what is left.

python -m tests.ledger_flow.crash_points FOLDER EVERY START

One process that forks: a child runs the scenario and dies at its n-th step, another recovers, posts and proves.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sqlalchemy import event

from ledger.database import Database
from ledger.gate import Gate, Hold
from ledger.journal import Files
from ledger.migrations import migrate
from ledger.quotas import Scope
from ledger.verify import verify
from tests.ledger_flow.material import USD, House, used

DIED = 77


class Steps(Files):
    """Counts what the journal asks of the system; at step `last` ends the process, before or half-way through it."""

    def __init__(self, last: int | None) -> None:
        self.count = 0
        self.last = last

    def step(self) -> bool:
        self.count += 1
        return self.count == self.last

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self.step():
            os.pwrite(fd, data[: len(data) // 2], offset)  # a torn write
            os._exit(DIED)
        return super().pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._or_die()
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._or_die()
        super().truncate(fd, size)

    def sync_data(self, fd: int) -> None:
        self._or_die()
        super().sync_data(fd)

    def sync_directory(self, path: Path) -> None:
        self._or_die()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._or_die()
        super().rename(source, target)

    def _or_die(self, *_: Any) -> None:
        if self.step():
            os._exit(DIED)


async def scenario(folder: Path, steps: Steps, log: int) -> None:
    """Every kind of request, posted in between, and a clean end."""
    house = await open_house(folder)
    for name in ("begin", "commit"):
        event.listen(house.db.engine.sync_engine, name, steps._or_die)
    gate = await house.gate(files=steps, segment_bytes=1 << 20)
    await settled(log, await gate.hold(house.ask()), 150)
    stream = await gate.hold(house.ask(output=3_000, streamed=True))
    _write(log, f"S {stream.ask.request_id} 100 2000")
    for generated in range(100, 2_001, 100):
        if not stream.covers(generated):
            await stream.extend(generated - 1)
        stream.progress(100, generated)
        await asyncio.sleep(0)
    await house.post()
    await settled(log, stream, 2_000)
    keyed = await gate.hold(house.ask(idempotency_key="k", body_hash="h"))
    await settled(log, keyed, 20, answer=b"answer")
    await (await gate.hold(house.ask())).void("refused upstream")
    over = await gate.hold(house.ask(output=10))
    await settled(log, over, 50)
    await house.post()
    await gate.close()
    await house.post()
    await house.db.close()


async def settled(log: int, hold: Hold, generated: int, **options: Any) -> None:
    _write(log, f"S {hold.ask.request_id} 100 {generated}")
    receipt = await hold.settle(used(100, generated, **options))
    _write(log, f"D {hold.ask.request_id} {receipt.billed_tokens} {receipt.cost_usd_pico}")


async def recover(folder: Path) -> None:
    """The next worker of the slot; raises when anything is lost, doubled, invented or stranded."""
    house = await open_house(folder)
    gate = await Gate.open(house.db, house.journal_dir, 0, segment_bytes=1 << 20)
    await house.post()
    hold = await gate.hold(house.ask())
    await hold.settle(used())
    await gate.close()
    await house.post()
    report = await verify(house.db, house.journal_dir)
    assert report.first_difference is None, report.first_difference
    assert report.unposted == 0
    assert await house.leased() == 0
    rows = {row.request_id: row for row in await house.rows()}
    produced: dict[str, int] = {}
    for line in (folder / "log").read_text().splitlines() if (folder / "log").exists() else []:
        kind, request_id, first, second = line.split()
        if kind == "S":
            produced[request_id] = int(first) + int(second)
        else:
            assert (rows[request_id].billed_tokens, rows[request_id].cost_usd_pico) == (int(first), int(second))
    for request_id, row in rows.items():
        assert request_id == hold.ask.request_id or row.billed_tokens <= produced[request_id]
    await house.db.close()


async def furnish(folder: Path) -> None:
    url = f"sqlite:///{folder / 'tallygate.db'}"
    await migrate(url)
    house = House(await Database.open(url), folder / "journal")
    await house.furnish()
    await house.budget(Scope.of_key(house.key_id), 3 * USD)
    given = {"team_id": house.team_id, "key_id": house.key_id}
    (folder / "house.json").write_text(json.dumps(given))
    await house.db.close()


async def open_house(folder: Path) -> House:
    given = json.loads((folder / "house.json").read_text())
    return House(await Database.open(f"sqlite:///{folder / 'tallygate.db'}"), folder / "journal", **given)


def run_scenario(folder: Path, last: int | None) -> int:
    """Returns how many steps the scenario took, when it was left to end."""
    steps = Steps(last)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    asyncio.run(scenario(folder, steps, log))
    return steps.count


def in_child(work: Callable[[], object]) -> int:
    """The exit status of `work` in a forked process: 0, or 1 after a traceback, or what it exits with."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _write(log: int, line: str) -> None:
    os.write(log, line.encode() + b"\n")


def _run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def main(folder: Path, every: int, start: int) -> None:
    template = folder / "template"
    template.mkdir(parents=True)
    assert in_child(lambda: _run(lambda: furnish(template))) == 0
    shutil.copytree(template, folder / "whole")
    assert in_child(lambda: (folder / "steps").write_text(str(run_scenario(folder / "whole", None)))) == 0
    total = int((folder / "steps").read_text())
    points = range(start, total + 1, every)
    for point in points:
        here = folder / f"point-{point}"
        shutil.copytree(template, here)
        status = in_child(lambda here=here, point=point: run_scenario(here, point))  # type: ignore[misc]
        if status not in (DIED, 0):
            raise SystemExit(f"step {point} of {total}: the worker ended with {status}")
        if in_child(lambda here=here: _run(lambda: recover(here))) != 0:  # type: ignore[misc]
            raise SystemExit(f"step {point} of {total}: the next worker found something wrong; see {here}")
        shutil.rmtree(here)
    print(f"{len(points)} of {total} crash points recovered")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
