"""The end of a month beside a running `serve`: from the shell and over the admin API."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from ledger.periods import period_of, previous_period
from tests.operator.test_serve import ENVIRON, TALLYGATE, Serving
from tests.services import ROOT
from tests.upstream.process import FakeUpstream


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, upstream_process: FakeUpstream) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("serving"), upstream_process) as started:
        yield started


def month_before_last() -> str:
    """One that is over in every zone, and in which the demo team used nothing."""
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    return previous_period(previous_period(period_of(now_ms, "UTC")))


def shell(serving: Serving, *words: str) -> tuple[int, Any, str]:
    """(exit code, JSON answer, what was said on standard error)."""
    options = ["--config", str(serving.base_dir / "tallygate.yaml"), "--data-dir", str(serving.base_dir), "--json"]
    command = [*TALLYGATE, *words, *options]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRON, check=False)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout else None, ran.stderr


def test_a_month_closes_beside_running_workers_and_its_invoice_is_credited(serving: Serving) -> None:
    assert serving.ask().status_code == 200
    month = month_before_last()
    code, closed, said = shell(serving, "month", "close", "--month", month, "--reason", "month end")
    assert (code, [item["state"] for item in closed["data"]]) == (0, ["closed"]), said
    code, open_, _ = shell(serving, "month", "close", "--month", "2099-01")
    assert (code, open_["data"][0]["state"]) == (1, "open")
    assert "not over there until" in open_["data"][0]["waiting_for"][0]
    with serving.administrator() as admin:
        again = admin.post(f"/months/{month}/close").json()["data"]
        assert [item["closed_at"] for item in again] == [closed["data"][0]["closed_at"]]
        invoice = admin.post("/invoices", json={"team_id": "demo", "month": month}).json()
        assert (invoice["state"], invoice["billed"], invoice["due"]) == ("finalized", "0", "0")
        note = {"amount": "1", "reference": "c1", "reason": "outage"}
        refused = admin.post(f"/invoices/{invoice['id']}/credit-notes", json=note)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        paid = admin.post(f"/invoices/{invoice['id']}/pay").json()
        assert paid["state"] == "paid"
    code, _, said = shell(serving, "invoice", "credit", invoice["id"], "0.005", "--reference", "r", "--reason", "x")
    assert (code, "whole cents" in said) == (2, True)


def test_finalizing_closes_the_month_first(serving: Serving) -> None:
    month = previous_period(month_before_last())
    code, invoice, said = shell(serving, "invoice", "finalize", "--team", "demo", "--month", month)
    assert (code, invoice["state"]) == (0, "finalized"), said
    with serving.administrator() as admin:
        assert admin.get("/months").json()["data"][-1]["state"] == "closed"
        early = admin.post("/invoices", json={"team_id": "demo", "month": "2099-01"})
        assert (early.status_code, "not over" in early.json()["error"]["message"]) == (400, True)
    assert shell(serving, "verify")[0] == 0
