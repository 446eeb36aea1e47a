"""What one warm request costs in counts, which a busy machine changes little: the figures of the regression gate.

python -m benchmarks.counted [--counters redis://127.0.0.1:6379/0] [--spoil]     prints JSON

One gateway worker, everything on, runs in this process, so that its function calls, syncs, SQL statements and scripts
can be counted where they happen; load and upstream are processes of their own. What a worker does by itself every
250 ms is switched off meanwhile, so a count of zero means zero. `--spoil` adds a SQL statement and a sync to each
request: so one sees that the gate would notice them.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
import yaml
from sqlalchemy import event
from sqlalchemy.engine import Engine

import proxy.worker
from benchmarks.processes import Process, free_port
from benchmarks.subjects import MODEL, configuration, furnish
from ledger.audit import latest_seq
from ledger.gate import Ask, Gate, Hold
from ledger.journal.files import Files
from policies.counters.resp import Link
from proxy.app import build_app
from proxy.http1 import Connection
from proxy.http_server import GatewayProtocol
from proxy.preflight import check_directories, listen
from proxy.seeding import prepare
from proxy.settings import Settings, load_settings

ALONE = 200
TOGETHER, CONNECTIONS = 640, 32
SLOW_SYNC_S = 0.02
"""Added to each sync while many ask at once: how requests share syncs must depend neither on this machine's disk nor on
how slowly a busy machine lets the next ones come."""
BODY = {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": "Write one sentence."}]}


class Counting:
    """Counts what this process does from now on. One per process: it looks into classes, not instances."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.slow_sync_s = 0.0
        sync, send = Files.sync_data, Link.send
        connected = Connection.connection_made

        def sync_data(files: Files, fd: int) -> None:
            self.counts["syncs"] += 1
            if self.slow_sync_s:
                time.sleep(self.slow_sync_s)
            sync(files, fd)

        def count_send(link: Link, *words: Any, **options: Any) -> Any:
            self.counts["counter_commands"] += 1
            return send(link, *words, **options)

        def connection_made(connection: Connection, transport: Any) -> None:
            self.counts["upstream_connections"] += 1
            connected(connection, transport)

        for place, name, counted in (
            (Files, "sync_data", sync_data),
            (Link, "send", count_send),
            (Connection, "connection_made", connection_made),
        ):
            setattr(place, name, counted)

        @event.listens_for(Engine, "before_cursor_execute")
        def count_statement(*_: object) -> None:
            self.counts["sql_statements"] += 1

    async def run(self, port: int, key: str, connections: int, requests: int) -> dict[str, float]:
        """Counts per request while so many are asked."""
        self.counts.clear()
        before = reads_and_writes()
        profile = cProfile.Profile()
        profile.enable()
        await ask(port, key, connections, requests)
        profile.disable()
        counts = {**self.counts, "function_calls": sum(entry.callcount for entry in profile.getstats())}
        if before is not None and (after := reads_and_writes()) is not None:
            counts["reads_and_writes"] = after - before
        names = ("syncs", "sql_statements", "counter_commands", "upstream_connections", *counts)
        return {name: round(counts.get(name, 0) / requests, 3) for name in dict.fromkeys(names)}


def reads_and_writes() -> int | None:
    """System calls that read or write, of all threads of this process; None where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in lines if line.startswith(("syscr:", "syscw:")))


async def ask(port: int, key: str, connections: int, requests: int) -> None:
    """`requests` in a closed loop, by a process of their own. Raises RuntimeError when one fails."""
    arguments = ["--port", str(port), "--key", key, "--connections", str(connections), "--requests", str(requests)]
    load = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load", *arguments, "--body", json.dumps(BODY)
    )
    if await load.wait():
        raise RuntimeError("some requests failed")


async def count(settings: Settings) -> dict[str, Any]:
    key = await furnish(settings)
    counting = Counting()
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(build_app(settings, slot=0), http=GatewayProtocol, log_config=None, proxy_headers=False)
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        await ask(port, key, CONNECTIONS, 2 * CONNECTIONS)  # caches, leases and connections are warm from here on
        rounds = [await counting.run(port, key, 1, ALONE) for _ in range(2)]
        alone = min(rounds, key=lambda counts: counts["function_calls"])  # more is the machine's doing
        counting.slow_sync_s = SLOW_SYNC_S
        await ask(
            port, key, CONNECTIONS, 2 * CONNECTIONS
        )  # a connection that was idle while one asked alone has expired
        together = await counting.run(port, key, CONNECTIONS, TOGETHER)
        counting.slow_sync_s = 0.0
        server.should_exit = True
        await serving
    return {"alone": alone, "together": together}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


def spoil() -> None:
    """Every hold from now on reads SQL and waits for the disk, as a careless change might make it."""
    hold = Gate.hold

    async def careless(gate: Gate, ask: Ask) -> Hold:
        async with gate.db.read() as c:
            await latest_seq(c)
        held = await hold(gate, ask)
        await gate.journal.flush()
        return held

    setattr(Gate, "hold", careless)  # noqa: B010  mypy would not have it as an assignment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counters", default="memory")
    parser.add_argument("--spoil", action="store_true")
    arguments = parser.parse_args()
    if arguments.spoil:
        spoil()
    proxy.worker.REFRESH_S = 3_600.0
    with tempfile.TemporaryDirectory(prefix="tallygate-counted-") as name:
        folder, port = Path(name), free_port()
        config = folder / "tallygate.yaml"
        config.write_text(yaml.safe_dump(configuration(port, None, arguments.counters)))
        settings = load_settings(config, folder)
        check_directories(settings)
        with Process(["-m", "benchmarks.upstream", "--port", str(port)], 0, folder / "upstream.log", port):
            asyncio.run(prepare(settings))
            print(json.dumps(uvloop.run(count(settings)), indent=1))


if __name__ == "__main__":
    main()
