"""What becomes of a record that SQL refused, and of journals that nobody writes any more: from the API, the shell, and
by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from ledger.database import Database
from ledger.lost_journals import list_open_epochs
from ledger.records import Charge, Settle, Usage
from proxy.cli import main
from proxy.commands.serve import _Preparation
from proxy.settings import Settings, load_settings
from tests.conftest import run_apart
from tests.ledger_flow.material import MODEL, House, crash, now_ms, request_id, run
from tests.operator.conftest import Admin


async def refuse_one(settings: Settings) -> None:
    """A worker settles two requests; SQL refuses one, which names an account that does not exist."""
    house = House(await Database.open(settings.storage.database), settings.storage.journal_path)
    await house.furnish()
    gate = await house.gate()
    await run(gate, house.ask())
    usage, at_ms = Usage(prompt_tokens=1, billed_tokens=1), now_ms()
    who = (house.team_id, house.key_id, None, MODEL, "backend", None, "completed")
    await gate.journal.append_durable(
        Settle(request_id(), at_ms, at_ms, "2026-11", *who, usage, "none", 5, 5, 0, [Charge("nobody", 5)], 0)
    )
    await house.post()
    await house.close()


async def lease_and_lose(settings: Settings) -> None:
    house = House(await Database.open(settings.storage.database), settings.storage.journal_path)
    await house.furnish()
    gate = await house.gate(clock=lambda: now_ms() - 60_000)
    await gate.hold(house.ask())
    crash(house, gate)
    shutil.rmtree(settings.storage.journal_path)
    await house.close()


async def spend_and_alter(settings: Settings) -> None:
    house = House(await Database.open(settings.storage.database), settings.storage.journal_path)
    await house.furnish()
    await run(await house.gate(), house.ask())
    await house.gates.pop().close()
    await house.post()
    async with house.db.begin() as c:
        await c.execute(text("UPDATE transfers SET amount_pico = amount_pico + 5 WHERE kind = 'usage'"))
        await c.execute(text("UPDATE rollups SET generated_tokens = 0"))
    await house.close()


def shell(settings: Settings, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--data-dir", str(settings.data_dir.parent), "--json"])
    out = capsys.readouterr().out
    return int(ended.value.code or 0), json.loads(out) if out else None


def test_a_record_in_suspense_is_listed_tried_again_and_written_off(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(lambda: refuse_one(admin.settings))
    (found,) = admin.client.get("/suspense").json()["data"]
    assert "nobody, which does not exist" in found["refused_because"]
    assert shell(admin.settings, capsys, "suspense", "list") == (0, {"data": [found], "next_cursor": None})
    which = {name: found[name] for name in ("slot", "epoch", "frame")}
    assert admin.client.post("/suspense/retry", json=which).status_code == 400  # without a reason
    again = admin.client.post("/suspense/retry", json={**which, "reason": "try"})
    assert (again.status_code, "does not exist" in again.text) == (409, True)
    place = [str(value) for value in which.values()]
    code, written_off = shell(admin.settings, capsys, "suspense", "write-off", *place, "--reason", "no such account")
    assert (code, written_off["resolved_at"] is not None) == (0, True)
    assert admin.client.post("/suspense/write-off", json={**which, "reason": "twice"}).status_code == 409
    assert admin.client.get("/suspense").json()["data"] == []
    assert len(admin.client.get("/suspense?resolved=true").json()["data"]) == 1
    (act,) = admin.client.get("/audit?subject_kind=suspense").json()["data"]
    assert (act["action"], act["reason"]) == ("suspense.write_off", "no such account")
    assert admin.client.post("/verify", json={}).json()["ok"]


def test_a_lost_journal_is_declared_over_the_api(admin: Admin) -> None:
    run_apart(lambda: lease_and_lose(admin.settings))
    (found,) = admin.client.get("/journals").json()["data"]
    assert not admin.client.post("/verify", json={}).json()["ok"]
    which = {"slot": found["slot"], "epoch": found["epoch"], "reason": "the disk burnt"}
    freed = admin.client.post("/journals/declare-lost", json=which).json()["data"]
    assert freed == found["locked"] != []
    assert admin.client.get("/journals").json()["data"] == []
    assert admin.client.post("/journals/declare-lost", json=which).status_code == 409
    assert admin.client.post("/verify", json={}).json()["ok"]


async def test_a_start_with_fewer_workers_ends_the_slots_that_are_left(base_dir: Path) -> None:
    settings = load_settings(None, base_dir)
    await _Preparation(settings).try_once()
    db = await Database.open(settings.storage.database)
    house = House(db, settings.storage.journal_path)
    await house.furnish()
    gates = [await house.gate(slot) for slot in range(2)]
    for gate in gates:
        await run(gate, house.ask())
    crash(house, gates[1])  # slot 0 is the one that goes on
    assert settings.server.workers == 1
    await _Preparation(settings).try_once()
    await house.post()
    async with db.read() as c:
        assert await list_open_epochs(c) == [(gates[0].leases.slot_id, 1, True)]
    await house.close()


def test_a_correction_is_proposed_approved_and_audited_from_api_and_shell(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(lambda: spend_and_alter(admin.settings))
    code, proposed = shell(admin.settings, capsys, "verify", "--repair")
    found = {item["kind"]: item["id"] for item in proposed["data"]}
    assert (code, found.keys()) == (1, {"transfer", "rollup"})
    assert proposed["data"] == admin.client.get("/corrections").json()["data"]
    assert shell(admin.settings, capsys, "verify", "--approve", found["transfer"])[0] == 2  # without a reason
    assert shell(admin.settings, capsys, "verify", "--approve", found["transfer"], "--reason", "altered")[0] == 0
    for _ in range(2):
        posted = admin.client.post(f"/corrections/{found['rollup']}/approve", json={"reason": "altered too"})
        assert (posted.status_code, posted.json()["id"]) == (200, found["rollup"])
    assert admin.client.post("/corrections/fix_none/approve", json={"reason": "typing error"}).status_code == 404
    assert shell(admin.settings, capsys, "verify", "--repair") == (0, {"data": []})
    assert admin.client.post("/verify", json={}).json()["ok"]
    acts = admin.client.get("/audit?subject_kind=correction").json()["data"]
    assert [act["reason"] for act in acts] == ["altered too", "altered"]
    viewer = admin.client.post("/admin-tokens", json={"name": "v", "role": "finance"}).json()["token"]
    refused = admin.with_token(viewer).post(f"/corrections/{found['rollup']}/approve", json={"reason": "x"})
    assert refused.status_code == 403
