"""The links between hosts, cut and slowed in network namespaces. What a machine cannot do is printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.services import ROOT

ABLE = os.geteuid() == 0 and all(shutil.which(name) for name in ("unshare", "nsenter", "ip", "tc"))


@pytest.mark.soak
@pytest.mark.skipif(not os.environ.get("SECONDS"), reason="long: make soak")
@pytest.mark.skipif(not ABLE, reason="needs root, unshare, nsenter, ip and tc")
def test_a_host_that_is_cut_off_costs_the_other_no_request_and_nobody_money() -> None:
    command = [sys.executable, "-m", "tests.fleet.networks"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
