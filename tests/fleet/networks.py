"""Two hosts in network namespaces of their own, and what their links do to them: cut, slow, losing packets.

`python -m tests.fleet.networks` (as root, on Linux) prints a table. All of it happens in namespaces that it makes and
that go with it; the machine's own network is never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fleet.hosts import Fleet, Host
from tests.fleet.load import Tally, load
from tests.services import Postgres, Valkey, running, wait_until
from tests.upstream.process import FakeUpstream

CORE = "10.77.0.1"
CUT_S = 6.0
SLOW = "tbf rate 400kbit burst 8kb latency 60ms"
"""A queue of 60 ms at 400 kbit/s; what comes beyond it is dropped."""
LOSSY = "netem delay 20ms 10ms loss 1%"


def sh(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def namespace(number: int) -> Iterator[tuple[str, ...]]:
    """A namespace with the address 10.77.0.(number + 2), behind the link `host<number>`; yields what to put before a
    command that shall run in it."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as holder:
        try:
            wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"), 30)
            inside = ("nsenter", "--target", str(holder.pid), "--net")
            link = f"host{number}"
            sh("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            sh("ip", "link", "set", link, "master", "br0", "up")
            sh(*inside, "ip", "link", "set", "lo", "up")
            sh(*inside, "ip", "address", "add", f"10.77.0.{number + 2}/24", "dev", "eth0")
            sh(*inside, "ip", "link", "set", "eth0", "up")
            yield inside
        finally:
            holder.kill()


@contextmanager
def fleet() -> Iterator[tuple[Fleet, Postgres, str]]:
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "br0", "type", "bridge")
    sh("ip", "address", "add", f"{CORE}/24", "dev", "br0")
    sh("ip", "link", "set", "br0", "up")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = Postgres(f"listen_addresses=127.0.0.1,{CORE}")
        postgres.trust(f"{CORE}/24")
        stack.enter_context(running(postgres))
        valkey = stack.enter_context(running(Valkey("--bind", "127.0.0.1", CORE, "--protected-mode", "no")))
        upstream = stack.enter_context(FakeUpstream("--host", "0.0.0.0"))
        name = postgres.create_database()
        at_core = [url.replace("127.0.0.1", CORE) for url in (postgres.url(name), valkey.url, upstream.base_url)]
        hosts = []
        for number in range(2):
            inside = stack.enter_context(namespace(number))
            hosts.append(Host(folder / f"host-{number}", *at_core, address=f"10.77.0.{number + 2}", within=inside))
            stack.callback(hosts[-1].close)
            hosts[-1].start(wait=False)
        for host in hosts:
            host.wait_ready()
        yield Fleet(hosts), postgres, name


async def trial(made: Fleet, key: str, fault: str) -> tuple[Tally, Tally, float]:
    """(what clients of the untouched host got, of the other, seconds until that one answered again)."""
    tallies, stop = [Tally(), Tally()], asyncio.Event()
    loads = [
        asyncio.create_task(load([host.port], [key], 8, stop.is_set, pause_s=0.1, tally=tally, address=host.address))
        for host, tally in zip(made.hosts, tallies, strict=True)
    ]
    await asyncio.sleep(2)
    words = ("tc", "qdisc", "replace", "dev", "host1", "root")
    if fault == "cut":
        sh("ip", "link", "set", "host1", "down")
    else:
        sh(*words, *fault.split())
    await asyncio.sleep(CUT_S)
    if fault == "cut":
        sh("ip", "link", "set", "host1", "up")
    else:
        sh("tc", "qdisc", "del", "dev", "host1", "root")
    healed = time.monotonic()
    await asyncio.sleep(10)
    stop.set()
    await asyncio.gather(*loads)
    first = min(
        (o.at + o.took_s for o in tallies[1].outcomes if o.status == 200 and o.at + o.took_s > healed), default=0
    )
    return tallies[0], tallies[1], first - healed


def main() -> None:
    if "--inside" not in sys.argv:
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", "tests.fleet.networks", "--inside"])
    wrong = 0
    with fleet() as (made, postgres, database):
        key = made.new_key(money="0.5")
        print("| link of one host | other host: requests, failed | this host: requests, failed | back after, s |")
        print("|---|---|---|---|")
        for name, fault in (("cut for 6 s", "cut"), ("slow, drops packets", SLOW), ("netem", LOSSY)):
            try:
                other, this, back_s = asyncio.run(trial(made, key, fault))
            except RuntimeError as error:
                print(f"| {name} | could not run: {error} | | |", flush=True)
                continue
            told = [f"{len(tally.outcomes)}, {len(tally.failures())}" for tally in (other, this)]
            print(f"| {name} | {told[0]} | {told[1]} | {back_s:.1f} |", this.statuses(), flush=True)
            wrong += len(other.failures())
        over = postgres.sql("SELECT count(*) FROM accounts WHERE debits_pico + leased_pico > credits_pico", database)
        proofs = []
        for host in made.hosts:
            with contextlib.suppress(TimeoutError):
                wait_until(lambda: made.verify(host)["unposted"] == 0, 30)  # noqa: B023
            proofs.append(made.verify(host)["ok"])
        print(f"overspent accounts: {over.strip()}; verify passes: {proofs}")
        wrong += int(over) + proofs.count(False)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
