"""What one request makes the system do: system calls, syncs, and messages to each neighbour, as strace sees them.

Counted while 32 connections ask, less what the idle worker does by itself in the same time. Under strace everything is
slow, so these are counts and never times.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import uvloop

from benchmarks.load import closed_loop

CONNECTIONS = 32
_CALL = re.compile(r"^\d+ +(\w+)\((.*)$")
_PEER = re.compile(r"->[\[\]0-9a-f.:]*:(\d+)\]>")
_SENDING = frozenset({"write", "writev", "sendto", "sendmsg"})


def work_per_request(
    pid: int, port: int, request: bytes, neighbours: Mapping[str, int], folder: Path, seconds: float = 3.0
) -> dict[str, float]:
    """neighbours: name → TCP port of what the worker talks to. Empty where strace is not there or may not attach."""
    strace = shutil.which("strace")
    if strace is None:
        return {}
    idle = _trace(strace, pid, neighbours, folder, lambda: time.sleep(2.0))
    result = None

    def ask() -> None:
        nonlocal result
        result = uvloop.run(closed_loop(port, request, CONNECTIONS, seconds, warmup_s=0.0))

    busy = _trace(strace, pid, neighbours, folder, ask)
    if result is None or idle is None or busy is None or not result.requests:
        return {}
    share = busy.seconds / idle.seconds
    counted = {name: (busy.calls[name] - idle.calls[name] * share) / result.requests for name in busy.calls}
    return {name: round(max(0.0, count), 2) for name, count in counted.items()}


class _Traced:
    def __init__(self, seconds: float, calls: Counter[str]) -> None:
        self.seconds = seconds
        self.calls = calls


def _trace(strace: str, pid: int, neighbours: Mapping[str, int], folder: Path, run: object) -> _Traced | None:
    assert callable(run)
    out = folder / "strace.out"
    command = [strace, "-f", "-qq", "-yy", "-s", "0", "-o", str(out), "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    time.sleep(0.7)
    if tracer.poll() is not None:
        return None
    started = time.perf_counter()
    run()
    seconds = time.perf_counter() - started
    tracer.terminate()
    tracer.wait()
    calls = _count(out.read_text(errors="replace"), neighbours)
    out.unlink()
    return _Traced(seconds, calls)


def _count(text: str, neighbours: Mapping[str, int]) -> Counter[str]:
    names = {str(port): name for name, port in neighbours.items()}
    calls: Counter[str] = Counter({"system calls": 0, "syncs": 0, **dict.fromkeys(neighbours, 0)})
    for line in text.splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        call, rest = match.groups()
        calls["system calls"] += 1
        if call in ("fdatasync", "fsync"):
            calls["syncs"] += 1
        elif call in _SENDING and (peer := _PEER.search(rest)) is not None and peer[1] in names:
            calls[names[peer[1]]] += 1
    return calls
