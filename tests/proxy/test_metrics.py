"""What processes of one host count, added up in files, and how it reads as text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.exposition import text_of
from proxy.host_metrics import HostMetrics, forget_ended
from proxy.metrics import Metrics, Snapshot, Totals, added


class Process:
    """One that counts refusals, and is up."""

    def __init__(self, folder: Path, name: str) -> None:
        self.metrics = Metrics(lambda: {"ready": 1.0}, lambda: {"shared": 2})
        self.host = HostMetrics(folder, name, self.metrics.snapshot, self.metrics.go_on_from)

    def die(self) -> None:
        """As a killed process does: nothing is written any more."""
        assert self.host._lock is not None
        self.host._lock.close()


async def refusals(process: Process) -> int:
    counted, _ = await process.host.read()
    return added(counted).refused.get("x", 0)


async def test_whoever_is_asked_adds_up_what_all_have_counted(tmp_path: Path) -> None:
    one, two = Process(tmp_path, "gateway-0"), Process(tmp_path, "gateway-1")
    one.metrics.refused("x")
    two.metrics.refused("x")
    assert (await refusals(one), await refusals(two), await refusals(one)) == (1, 2, 2)
    counted, running = await one.host.read()
    assert added(counted).limit_decisions == {"shared": 4}
    assert list(running) == ["gateway-0", "gateway-1"]
    text = text_of(counted, running).decode()
    assert 'tallygate_processes{role="gateway"} 2' in text
    assert 'tallygate_ready{process="gateway-1"} 1.0' in text


async def test_one_that_is_dead_counts_and_runs_no_more_and_its_successor_goes_on(tmp_path: Path) -> None:
    one, two = Process(tmp_path, "gateway-0"), Process(tmp_path, "gateway-1")
    one.metrics.refused("x")
    await one.host.write()
    one.die()
    counted, running = await two.host.read()
    assert (added(counted).refused, list(running)) == ({"x": 1}, ["gateway-1"])
    successor = Process(tmp_path, "gateway-0")
    successor.metrics.refused("x")
    assert await refusals(successor) == 2
    assert await refusals(two) == 2
    successor.metrics.refused("x")
    assert await refusals(successor) == 3
    assert added((await two.host.read())[0]).limit_decisions == {"shared": 6}


async def test_a_name_that_its_holder_still_has_is_taken_once_it_ends(tmp_path: Path) -> None:
    old, new = Process(tmp_path, "gateway-0"), Process(tmp_path, "gateway-0")
    for process in (old, new):
        process.metrics.refused("x")
    assert await refusals(old) == 1
    assert await refusals(new) == 2
    old.metrics.refused("x")
    await old.host.close()
    assert await refusals(new) == 3
    assert list((await new.host.read())[1]) == ["gateway-0"]


async def test_a_disk_that_takes_nothing_leaves_a_worker_its_own_numbers(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("a file where the directory should be")
    process = Process(tmp_path / "metrics", "gateway-0")
    process.metrics.refused("x")
    assert await refusals(process) == 1


@pytest.mark.parametrize("left", [b"", b"{", b'{"settled": [[["m", "d", "s"], {"buckets": [1]}]]}'])
async def test_a_file_that_cannot_be_read_counts_for_nothing(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "gateway-0.json").write_bytes(left)
    (tmp_path / "poster.json").write_bytes(left)
    process = Process(tmp_path, "gateway-0")
    process.metrics.refused("x")
    assert await refusals(process) == 1


async def test_a_start_forgets_those_that_have_ended_and_no_other(tmp_path: Path) -> None:
    one, two = Process(tmp_path, "gateway-0"), Process(tmp_path, "gateway-1")
    for process in (one, two):
        process.metrics.refused("x")
        await process.host.write()
    one.die()
    forget_ended(tmp_path)
    assert await refusals(two) == 1
    assert await refusals(Process(tmp_path, "gateway-0")) == 1


async def test_what_was_counted_is_told_in_full(tmp_path: Path) -> None:
    """Sums past what six digits hold, and money past 64 bits."""
    process, other = Process(tmp_path, "gateway-0"), Process(tmp_path, "gateway-1")
    tokens = SimpleNamespace(prompt_tokens=1, generated_tokens=2, draft_tokens=3, accepted_tokens=4)
    for place in (process, other):
        for latency_ms in (7, 1_234_567_890):
            outcome = SimpleNamespace(
                deployment="d", status="completed", tokens=tokens, latency_ms=latency_ms, ttft_ms=None
            )
            receipt = SimpleNamespace(billed_tokens=3, cost_usd_pico=10**20, cost_cny_pico=1)
            place.metrics.settled("m", outcome, receipt)  # type: ignore[arg-type]
        await place.host.write()
    text = text_of(*await process.host.read()).decode()
    at = 'model="m",deployment="d",status="completed"'
    for line in (
        f"tallygate_requests_total{{{at}}} 4",
        f"tallygate_cost_usd_total{{{at}}} 400000000",
        f"tallygate_cost_cny_total{{{at}}} 0.000000000004",
        f"tallygate_request_seconds_sum{{{at}}} 2469135.794",
        f'tallygate_request_seconds_bucket{{{at},le="0.005"}} 0',
        f'tallygate_request_seconds_bucket{{{at},le="0.01"}} 2',
        f'tallygate_request_seconds_bucket{{{at},le="+Inf"}} 4',
        f"tallygate_first_token_seconds_count{{{at}}} 0",
    ):
        assert line in text.splitlines()


def test_adding_changes_nothing_that_was_added() -> None:
    one, two = (Snapshot(settled=[(("m", "d", "s"), Totals(requests=n))]) for n in (1, 2))
    assert added([one, two]).settled[0][1].requests == 3
    assert (one.settled[0][1].requests, two.settled[0][1].requests) == (1, 2)
