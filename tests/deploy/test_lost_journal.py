"""The road out of a lost disk, from the shell: see what it had leased, say that it is lost, go on."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from ledger.database import Database
from ledger.schema import slots
from proxy.cli import main
from proxy.settings import load_settings
from tests.ledger_flow.material import House


def shell(data_dir: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """(exit code, JSON answer, standard error) of a command."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--data-dir", str(data_dir), "--json"])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(out) if out else None, err


def make_ledger(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["migrate", "--data-dir", str(data_dir)])
    assert not ended.value.code
    capsys.readouterr()


async def lease_and_vanish(data_dir: Path) -> str:
    """A gateway leases money, and its host goes with its disk. Returns its slot."""
    settings = load_settings(None, data_dir)
    db = await Database.open(settings.storage.database)
    house = House(db, settings.storage.journal_path)
    await house.furnish()
    gate = await house.gate()
    await gate.hold(house.ask())
    if gate._ticker is not None:
        gate._ticker.cancel()
    gate.journal.abandon()
    shutil.rmtree(settings.storage.journal_path)
    await db.close()
    return gate.leases.slot_id


async def fall_silent(data_dir: Path) -> None:
    db = await Database.open(load_settings(None, data_dir).storage.database)
    async with db.begin() as c:
        await c.execute(update(slots).values(heartbeat_ms=slots.c.heartbeat_ms - 60_000))
    await db.close()


def test_a_lost_disk_is_declared_and_its_money_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_ledger(tmp_path, capsys)
    assert shell(tmp_path, capsys, "journal", "list")[1] == {"data": []}
    slot = asyncio.run(lease_and_vanish(tmp_path))
    _, listed, _ = shell(tmp_path, capsys, "journal", "list")
    (found,) = listed["data"]
    assert (found["slot"], found["epoch"]) == (slot, 1)
    locked = found["locked"]
    assert locked.endswith(" USD")

    lost = ("journal", "declare-lost", slot, "1", "--reason", "the disk burnt")
    code, _, complaint = shell(tmp_path, capsys, *lost)
    assert code == 1
    assert "in use" in complaint
    asyncio.run(fall_silent(tmp_path))
    (freed,) = shell(tmp_path, capsys, *lost)[1]["freed"]
    assert f"{freed['amount']} {freed['currency']}" == locked
    assert freed["account"].startswith("prepaid:")
    assert shell(tmp_path, capsys, "journal", "list")[1] == {"data": []}
    assert shell(tmp_path, capsys, "verify")[0] == 0
    acts = shell(tmp_path, capsys, "audit")[1]["data"]
    assert (acts[0]["action"], acts[0]["reason"]) == ("epoch.declare_lost", "the disk burnt")


def test_a_journal_that_nobody_knows_cannot_be_declared_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_ledger(tmp_path, capsys)
    code, _, complaint = shell(tmp_path, capsys, "journal", "declare-lost", "nobody/0", "1", "--reason", "typing error")
    assert code == 1
    assert "no epoch 1 of slot" in complaint
