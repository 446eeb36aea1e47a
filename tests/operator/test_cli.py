"""The command line over a ledger of its own: what it prints, on which stream, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def tallygate(base_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `tallygate ARGUMENTS --data-dir …` in this process."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--data-dir", str(base_dir)])
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run


def test_what_is_logged_does_not_mix_with_the_answer(base_dir: Path) -> None:
    command = [sys.executable, "-m", "proxy.cli", "journal", "accept-damage", "--slot", "0", "--reason", "none"]
    ran = subprocess.run([*command, "--json", "--data-dir", str(base_dir)], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == {"data": []}


def test_a_ledger_that_is_not_there_is_not_proved(tallygate: Run, base_dir: Path) -> None:
    (base_dir / "data" / "tallygate.db").unlink()
    for _ in range(2):
        ran = tallygate("verify")
        assert (ran.code, ran.out) == (2, "")
        assert f"no ledger at {base_dir / 'data' / 'tallygate.db'}: give --data-dir or --config" in ran.err
    tallygate("migrate")
    assert tallygate("verify").code == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(base_dir: Path, closed: str) -> None:
    for arguments, code in (("verify", 0), ("verify --month x", 2)):
        line = f"exec {sys.executable} -m proxy.cli {arguments} --data-dir {base_dir} {closed}"
        ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, timeout=60)
        assert (ran.returncode, "Traceback" in ran.stderr) == (code, False)


def test_a_team_a_key_and_a_payment_from_the_shell(tallygate: Run) -> None:
    team = tallygate("team", "create", "Web shop", "--currency", "CNY", "--json").json
    assert (team["billing_currency"], team["timezone"]) == ("CNY", "Asia/Shanghai")
    key = tallygate("key", "create", "--team", "Web shop", "--name", "ci", "--model", "m", "--json").json
    assert key["key"].startswith("sk-tg-")
    assert (key["team_id"], key["models"]) == (team["id"], ["m"])
    for _ in range(2):
        paid = tallygate("topup", "100.5", "--team", team["id"], "--reference", "bank-1", "--json").json
        assert paid["amount"] == "100.5"
    assert tallygate("balance", "--team", "Web shop", "--json").json["available"] == "100.5"
    listed = tallygate("key", "list")
    assert [line.split("\t")[0] for line in listed.out.splitlines()] == ["id", key["id"]]
    assert key["key"] not in listed.out


def test_a_key_is_blocked_rotated_and_deleted(tallygate: Run) -> None:
    tallygate("team", "create", "t")
    key = tallygate("key", "create", "--team", "t", "--json").json
    assert tallygate("key", "block", key["id"], "--reason", "leaked", "--json").json["state"] == "blocked"
    assert tallygate("key", "unblock", key["id"], "--json").json["state"] == "active"
    assert tallygate("key", "rotate", key["id"], "--overlap", "60", "--json").json["key"] != key["key"]
    assert tallygate("key", "delete", key["id"], "--json").json["state"] == "deleted"
    acts = tallygate("audit", "--subject", key["id"], "--json").json["data"]
    assert [act["action"] for act in acts] == ["key.delete", "key.rotate", "key.update", "key.update", "key.create"]
    assert acts[3]["reason"] == "leaked"
    assert acts[0]["actor"].startswith("cli:")


def test_quotas_are_set_by_rules(tallygate: Run) -> None:
    tallygate("team", "create", "t", "--currency", "CNY")
    rules = ("requests/minute=60", "spend/month=50.5", "tokens/day@deepseek-v3.2=1000000:soft", "concurrency=8")
    found = tallygate("quota", "set", "--team", "t", *rules, "--json").json["data"]
    assert sorted((item["metric"], item["window"], item["model"], item["limit"], item["hard"]) for item in found) == [
        ("concurrency", None, None, 8, True),
        ("requests", "minute", None, 60, True),
        ("spend", "month", None, "50.5", True),
        ("tokens", "day", "deepseek-v3.2", 1_000_000, False),
    ]
    assert len(tallygate("quota", "list", "--team", "t").out.splitlines()) == 1 + 4
    assert tallygate("quota", "set", "--team", "t", "--clear", "--json").json["data"] == []
    for wrong in ("requests", "requests/minute=x", "colour/minute=3", "requests/century=3"):
        refused = tallygate("quota", "set", "--team", "t", wrong)
        assert refused.code == 2
        assert "is not a quota" in refused.err
    assert tallygate("quota", "set", "--team", "t").code == 2


def test_prices_follow_the_exchange_rate(tallygate: Run) -> None:
    tallygate("fx", "set", "USD_CNY", "7.3")
    published = tallygate("price", "publish", "deepseek-v3.2", "--input", "0.28", "--output", "0.42", "--json").json
    assert published["prices"][0]["cny"]["output"] == "3.066"
    assert tallygate("fx", "list", "--json").json["data"][0]["rate"] == "7.3"
    assert "3.066" in tallygate("price", "list").out
    assert tallygate("price", "publish", "m", "--input", "cheap", "--output", "1").code == 2
    assert tallygate("fx", "set", "USD_EUR", "1").code == 2


def test_an_admin_token_is_made_and_revoked(tallygate: Run) -> None:
    made = tallygate("admin-token", "create", "controller", "--role", "finance", "--json").json
    assert made["token"].startswith("tg-admin-")
    assert made["token"] not in tallygate("admin-token", "list").out
    assert tallygate("admin-token", "revoke", made["id"], "--json").json["revoked_at"] is not None
    assert tallygate("admin-token", "create", "x", "--role", "god").code == 2


def test_a_refund_pays_back_what_is_free_and_no_more(tallygate: Run) -> None:
    tallygate("team", "create", "t")
    tallygate("topup", "10", "--team", "t", "--reference", "a")
    for _ in range(2):
        assert tallygate("refund", "4", "--team", "t", "--reference", "b", "--json").json["amount"] == "4"
    assert tallygate("balance", "--team", "t", "--json").json["available"] == "6"
    assert tallygate("refund", "7", "--team", "t", "--reference", "c").code == 1


def test_an_undamaged_journal_and_an_unknown_epoch_are_left_alone(tallygate: Run) -> None:
    assert tallygate("journal", "list", "--json").json["data"] == []
    assert tallygate("journal", "declare-lost", "host/0", "7", "--reason", "x").code == 1
    assert tallygate("journal", "accept-damage", "--slot", "0", "--reason", "x").code == 1


def test_errors_are_one_line_and_never_a_traceback(tallygate: Run) -> None:
    for arguments, code in (
        (("balance", "--team", "nobody"), 1),
        (("team", "create", "x", "--currency", "EUR"), 2),
        (("team", "create", "x", "--timezone", "Mars"), 2),
        (("key", "rotate", "key_none"), 1),
        (("team",), 2),
        (("nonsense",), 2),
        (("team", "list", "--limit", "many"), 2),
        (("team", "list", "--limit", "0"), 2),
        (("month", "close", "--month", "2026-13"), 2),
        (("month", "close", "--month", "2026-01", "--leave-out", "host/0"), 2),
    ):
        ran = tallygate(*arguments)
        assert ran.code == code, arguments
        if ran.err:
            assert len(ran.err.splitlines()) == 1, ran.err
            assert ran.err.startswith("tallygate: ")
            assert "Traceback" not in ran.err


def test_config_check_prints_every_problem_with_its_line(tmp_path: Path, tallygate: Run) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("server:\n  prt: 1\nstorage:\n  databse: x\n")
    ran = tallygate("config", "check", str(file))
    assert ran.code == 2
    lines = ran.err.splitlines()
    assert [line.startswith(f"{file}:{number}: ") for line, number in zip(lines, (2, 4), strict=True)] == [True, True]
    assert json.loads(tallygate("config", "check", str(file), "--json").out)["errors"] == lines
    file.write_text("server: {port: 9000}\n")
    assert tallygate("config", "check", str(file)).code == 0


def test_a_database_made_by_another_release_is_refused(base_dir: Path, tallygate: Run) -> None:
    import sqlite3

    with sqlite3.connect(base_dir / "data/tallygate.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    ran = tallygate("team", "list")
    assert ran.code in (1, 2)
    assert "9999" in ran.err


COMMANDS = [
    *("serve", "gateway", "poster", "backend", "migrate", "config check", "report canary"),
    *("topup", "grant", "refund", "balance", "audit", "usage", "request", "verify"),
    *("webhook list", "webhook retry"),
    *("journal list", "journal declare-lost", "journal accept-damage"),
    *("team create", "team list", "team show", "team set", "quota set", "quota list"),
    *("key create", "key list", "key rotate", "key block", "key unblock", "key delete"),
    *("invoice export", "invoice list", "invoice finalize", "invoice pay", "invoice void"),
    *("invoice credit", "month close", "month list"),
    *("price publish", "price list", "fx set", "fx list"),
    *("admin-token create", "admin-token list", "admin-token revoke"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: tallygate {' '.join(words)}" in text
    assert "--data-dir" in text


def test_the_installed_command_runs_in_a_directory_with_other_packages_of_our_names(tmp_path: Path) -> None:
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy/__init__.py").write_text("raise RuntimeError('not ours')")
    command = [sys.executable, "-P", "-m", "proxy.cli", "--help"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"serve\b", ran.stdout)
