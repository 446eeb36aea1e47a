"""What is shown as a price is what is charged, wherever the configuration says something else."""

from __future__ import annotations

import json
import socket
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.seeding import FirstRun, prepare
from proxy.settings import Settings, load_settings
from proxy.start_screen import _drafts, start_screen
from proxy.supervisor import Plan
from tests.conftest import run_apart
from tests.operator.conftest import Admin
from tests.services import free_port

CONFIGURED = """\
upstreams: {far: {base_url: "http://127.0.0.1:9/v1"}}
billing: {timezone: Europe/Berlin}
models:
  m: {deployments: [{to: far}], price: {input: "0.28", cache_read: "0.028", output: "OUTPUT"}}
  unpriced: {deployments: [{to: far}]}
"""


def configure(base_dir: Path, output: str) -> Settings:
    file = base_dir / "tallygate.yaml"
    file.write_text(CONFIGURED.replace("OUTPUT", output))
    return load_settings(file, base_dir, environ={})


def screen(settings: Settings, first_run: FirstRun) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plan = Plan(settings, (), listener, None, lambda: settings)
        shown: str = run_apart(lambda: start_screen(plan, first_run, 1.0))
        return shown


def check(base_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(base_dir / "tallygate.yaml"), "--data-dir", str(base_dir), "--json"])
    assert ended.value.code == 0
    found: list[str] = json.loads(capsys.readouterr().out)["warnings"]
    return found


def test_the_price_in_force_is_shown_and_a_configured_one_that_is_not_charged_is_told(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(lambda: prepare(configure(base_dir, "0.42")))
    assert check(base_dir, capsys) == []
    settings = configure(base_dir, "0.5")
    first_run = run_apart(lambda: prepare(settings))
    shown = screen(settings, first_run)
    assert "0.28 in, 0.028 cached, 0.42 out, USD per 1M tokens (version pv_1)" in shown
    assert "0.5 out" not in shown
    assert "price publish unpriced" in shown
    (warning,) = first_run.prices.warnings
    assert warning.startswith(
        "m: the configured price (0.28 in, 0.028 cached, 0.5 out) is not charged; in force is pv_1 ("
    )
    assert "`tallygate price publish m`" in warning
    assert check(base_dir, capsys) == [warning]


def test_a_price_that_is_published_for_later_is_not_warned_of(
    base_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_apart(lambda: prepare(configure(base_dir, "0.42")))
    with pytest.raises(SystemExit):
        main(["price", "publish", "m", "--input", "0.28", "--output", "0.5", "--data-dir", str(base_dir)])
    capsys.readouterr()
    assert run_apart(lambda: prepare(configure(base_dir, "0.5"))).prices.warnings == []


def test_a_database_that_does_not_answer_keeps_no_configuration_from_being_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(tmp_path, "0.42")
    file = tmp_path / "tallygate.yaml"
    file.write_text(file.read_text() + f"storage: {{database: 'postgresql://u:p@127.0.0.1:{free_port()}/x'}}\n")
    assert check(tmp_path, capsys) == []
    assert not (tmp_path / "data").exists()


def test_the_demo_team_is_billed_by_the_configured_zone_and_the_screen_says_so(base_dir: Path) -> None:
    settings = configure(base_dir, "0.42")
    first_run = run_apart(lambda: prepare(settings))
    assert "its days and months in Europe/Berlin)" in screen(settings, first_run)
    with sqlite3.connect(base_dir / "data/tallygate.db") as connection:
        assert connection.execute("SELECT timezone FROM teams").fetchall() == [("Europe/Berlin",)]
    connection.close()


def test_the_example_call_of_the_screen_answers_the_same_each_time(base_dir: Path) -> None:
    settings = configure(base_dir, "0.42")
    shown = screen(settings, run_apart(lambda: prepare(settings)))
    curl = next(line for line in shown.splitlines() if line.strip().startswith("curl"))
    assert json.loads(curl.partition("-d ")[2].strip("'"))["temperature"] == 0


def test_names_of_one_draft_are_described_once() -> None:
    real = {"a": "small, 8 MB", "b": "small, 8 MB", "c": "lookup"}
    assert _drafts(["a", "c", "b", "d"], real) == "a, b (one draft under each name: small, 8 MB); c (lookup); d"


@dataclass
class Prices:
    """A ledger with a price of model m, and what `price publish` makes of it."""

    base_dir: Path
    capsys: pytest.CaptureFixture[str]

    def publish(self, *words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["price", "publish", "m", *words, "--data-dir", str(self.base_dir)])
        return (int(ended.value.code or 0), *self.capsys.readouterr())

    def last(self) -> dict[str, str]:
        with pytest.raises(SystemExit):
            main(["price", "list", "--json", "--data-dir", str(self.base_dir)])
        (item,) = json.loads(self.capsys.readouterr().out)["data"][0]["prices"]
        found: dict[str, str] = item["usd" if item["currency"] == "USD" else "cny"]
        return found


@pytest.fixture
def prices(base_dir: Path, capsys: pytest.CaptureFixture[str]) -> Prices:
    run_apart(lambda: prepare(configure(base_dir, "0.42")))
    return Prices(base_dir, capsys)


def test_a_price_that_is_not_named_stays_and_old_and_new_are_shown(prices: Prices) -> None:
    code, out, err = prices.publish("--input", "0.30", "--output", "0.45")
    assert (code, out.splitlines()[1:]) == (
        0,
        [
            "input\t0.28\t0.3\tchanged",
            "cache_read\t0.028\t0.028\t",
            "cache_write\t0.28\t0.3\tchanged",
            "output\t0.42\t0.45\tchanged",
            "output_reasoning\t0.42\t0.45\tchanged",
        ],
    )
    assert err.startswith("pv_2: m, default, USD per 1M tokens, in force from ")
    assert prices.publish("--input", "0.30", "--output", "0.45", "--reasoning", "0.6", "--cache-read", "0.03")[0] == 0
    assert prices.publish("--input", "0.31", "--output", "0.5")[0] == 0
    assert prices.last() == {
        "input": "0.31",
        "cache_read": "0.03",
        "cache_write": "0.31",
        "output": "0.5",
        "output_reasoning": "0.6",
    }


def test_a_kept_price_is_not_converted_in_silence(prices: Prices) -> None:
    code, _, err = prices.publish("--input", "2", "--output", "3", "--currency", "CNY")
    assert (code, "cache_read costs 0.028 USD: name it too where the currency changes" in err) == (2, True)
    assert prices.publish("--input", "2", "--output", "3", "--cache-read", "0.2", "--currency", "CNY")[0] == 0
    assert prices.last()["cache_read"] == "0.2"


def test_the_admin_api_keeps_what_is_not_named_and_repeats_itself(admin: Admin) -> None:
    admin.client.post("/fx-rates", json={"rate": "7.3"})
    first = {"model": "m", "input": "1", "cache_read": "0.1", "output": "2"}
    assert admin.client.post("/prices", json=first).status_code == 201
    body = {"model": "m", "input": "0.1", "output": "3", "effective_from": "2099-01-01T00:00:00Z"}
    made = [admin.client.post("/prices", json=body).json() for _ in range(2)]
    assert made[0]["id"] == made[1]["id"]
    usd = made[0]["prices"][0]["usd"]
    assert (usd["cache_read"], usd["cache_write"], usd["output_reasoning"]) == ("0.1", "0.1", "3")
