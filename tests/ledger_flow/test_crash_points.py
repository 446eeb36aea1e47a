from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.services import ROOT

EVERY = int(os.environ.get("EVERY", "6"))
"""Each how many-th crash point is tried; 1 tries all of them."""


def test_a_worker_may_die_at_any_write_sync_or_commit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ledger_flow.crash_points", str(tmp_path), str(EVERY), "1"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4_000:]
    assert "crash points recovered" in done.stdout
