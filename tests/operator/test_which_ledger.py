"""Commands work on the ledger that is meant, or say that there is none; they never make one beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.cli import main
from proxy.commands.recorded import record_config
from proxy.settings import SettingsError, load_settings

Run = Callable[..., tuple[int, str, str]]
CONFIGURED = """\
storage: {database: "sqlite:///data/other.db"}
upstreams: {far: {base_url: https://api.example.com/v1, api_key: env:FAR_API_KEY}}
webhooks: [{url: https://ops.example.com/hook, secret: file:hook-secret}]
models: {m: {deployments: [{to: far}], price: {input: "1", output: "2"}}}
"""


@pytest.fixture
def tallygate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `tallygate ARGUMENTS` in an empty directory, with no secret in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("TALLYGATE_CONFIG", "TALLYGATE_DATA_DIR", "FAR_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def served(tmp_path: Path, migrated_file: Path) -> Path:
    """The configuration with which `serve` ran here last; its ledger is there, and the bundled one's too."""
    (tmp_path / "data").mkdir()
    for name in ("other.db", "tallygate.db"):
        shutil.copy(migrated_file, tmp_path / "data" / name)
    config = tmp_path / "tallygate.yaml"
    config.write_text(CONFIGURED)
    record_config(tmp_path, config)
    return config


@pytest.mark.parametrize(
    "words",
    [
        *("usage", "team create Foo", "team list", "balance --team x", "topup 5 --team x --reference r", "verify"),
        *("month close --month 2026-01", "journal list", "route list", "price list", "suspense list", "audit"),
        "key create --team x",
    ],
)
def test_where_there_is_no_ledger_none_is_made(tmp_path: Path, tallygate: Run, words: str) -> None:
    told = "tallygate: no ledger in ./data: give --data-dir or --config, or start with `tallygate serve`\n"
    assert tallygate(*words.split()) == (2, "", told)
    assert not list(tmp_path.iterdir())


def test_migrate_makes_a_ledger_to_prepare_before_the_first_serve(tallygate: Run) -> None:
    assert tallygate("migrate")[0] == 0
    assert tallygate("team", "create", "Web shop")[0] == 0


def test_an_empty_database_is_not_filled_by_a_command(tallygate: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/tallygate.db").touch()
    code, out, err = tallygate("team", "create", "Foo")
    assert (code, out) == (2, "")
    assert "the database is empty: run `tallygate migrate`" in err


def test_commands_go_by_the_configuration_that_serve_ran_with(tallygate: Run, served: Path) -> None:
    code, _, err = tallygate("team", "create", "Web shop")
    assert (code, f"with {served}, as `serve` here" in err) == (0, True)
    code, out, err = tallygate("team", "list", "--json")
    assert (code, "Web shop" in out, err) == (0, True, "")
    assert "Web shop" in tallygate("team", "list", "--config", str(served), "--json")[1]
    record_config(served.parent, None)
    assert tallygate("team", "list", "--json")[1:] == ('{\n  "data": [],\n  "next_cursor": null\n}\n', "")


def test_a_recorded_configuration_that_is_gone_is_not_replaced_by_the_bundled_one(tallygate: Run, served: Path) -> None:
    served.unlink()
    told = f"tallygate: {served}, with which `tallygate serve` ran here, is gone: give --config\n"
    assert tallygate("topup", "5", "--team", "x", "--reference", "r") == (2, "", told)


def test_only_who_asks_upstreams_and_webhooks_needs_their_secrets(tallygate: Run, served: Path) -> None:
    assert tallygate("usage", "--config", str(served))[0] == 0
    code, _, err = tallygate("config", "check", str(served))
    assert (code, len(err.splitlines())) == (2, 2)
    with pytest.raises(SettingsError, match="FAR_API_KEY"):
        load_settings(served, served.parent, environ={})
    settings = load_settings(served, served.parent, environ={}, asks_others=False)
    assert (settings.upstreams["far"].api_key, settings.webhooks[0].secret) == (None, None)
    assert os.fspath(served) == settings.source
