"""The regression gate of the hot path: it counts work, which a busy machine changes little, and never time.

When a bound breaks, `python -m benchmarks.counted` shows the counts; raise a bound only for work that must be done.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.services import ROOT, Valkey

FUNCTION_CALLS = 608
"""Of one warm plain request, alone, everything on (CPython 3.11, uvloop)."""
READS_AND_WRITES = 12.5
"""System calls: 3 for the client's connection, 2 for the upstream's, 3 for the journal, the rest between threads."""
TOLERANCE = 1.1


def count(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.counted", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    return counts


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    return count()


def test_a_warm_request_reads_no_sql(counts: dict[str, Any]) -> None:
    assert counts["alone"]["sql_statements"] == 0
    assert counts["together"]["sql_statements"] == 0


def test_a_request_alone_waits_for_one_sync(counts: dict[str, Any]) -> None:
    assert counts["alone"]["syncs"] <= 1.02


def test_requests_at_once_share_their_syncs(counts: dict[str, Any]) -> None:
    assert counts["together"]["syncs"] <= 0.11


def test_connections_to_an_upstream_are_kept(counts: dict[str, Any]) -> None:
    assert counts["alone"]["upstream_connections"] <= 0.02
    assert counts["together"]["upstream_connections"] <= 0.05  # one a client, should one have to wait 4 s for its turn


def test_a_request_runs_no_more_code_than_it_did(counts: dict[str, Any]) -> None:
    assert counts["alone"]["function_calls"] <= FUNCTION_CALLS * TOLERANCE
    if "reads_and_writes" in counts["alone"]:
        assert counts["alone"]["reads_and_writes"] <= READS_AND_WRITES * TOLERANCE


def test_shared_limits_cost_two_scripts_a_request_and_no_sql(valkey: Valkey) -> None:
    counts = count("--counters", valkey.url)["alone"]
    assert counts["counter_commands"] < 2.5  # a heartbeat now and then is counted too
    assert counts["sql_statements"] == 0


def test_the_gate_notices_one_more_statement_and_one_more_sync() -> None:
    spoiled = count("--spoil")
    assert spoiled["alone"]["sql_statements"] >= 1
    assert spoiled["alone"]["syncs"] > 1.02
    assert spoiled["together"]["syncs"] > 0.11
