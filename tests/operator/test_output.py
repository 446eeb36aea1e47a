"""What a person reads at a terminal, what a pipe gets, and what is said when there is nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from proxy.cli import main
from proxy.commands.tables import for_terminal, tab_separated
from tests.operator.conftest import Admin

Run = Callable[..., tuple[int, str, str]]
ID = "01a22d85-c718-7000-bc30-c16c7a5de7a7"
COLUMNS = ("request_id", "created_at", "model", "waiver", "prompt_tokens", "cost_usd")
ROWS = [
    (ID, "2026-12-01T00:12:33.123Z", "deepseek-v3.2", "", "12", "0.0000140532"),
    (ID, "2026-12-01T00:12:34.000Z", "模型", "", "7", "0.00001"),
]


@pytest.fixture
def tallygate(base_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--data-dir", str(base_dir)])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_a_table_that_fits_has_aligned_columns_short_times_and_no_empty_ones() -> None:
    assert for_terminal(COLUMNS, ROWS, 120) == [
        "request_id                            created               model          prompt  cost_usd",
        f"{ID}  2026-12-01 00:12:33Z  deepseek-v3.2  12      0.0000140532",
        f"{ID}  2026-12-01 00:12:34Z  模型           7       0.00001",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_table_that_does_not_fit_becomes_records_and_no_cell_is_cut(width: int) -> None:
    lines = for_terminal(COLUMNS, ROWS, width)
    assert all(len(line) <= width for line in lines)
    assert lines.count(ID) == 2
    text = "\n".join(lines)
    for cell in ("created 2026-12-01 00:12:33Z", "model deepseek-v3.2", "prompt 12", "cost_usd 0.0000140532"):
        assert text.count(cell) == 1


def test_a_pipe_gets_every_column_in_full_under_a_header() -> None:
    assert tab_separated(COLUMNS, ROWS)[:2] == ["\t".join(COLUMNS), "\t".join(ROWS[0])]


@pytest.mark.parametrize("width", [80, 120])
def test_ids_at_a_real_terminal_are_in_one_piece(base_dir: Path, tallygate: Run, width: int) -> None:
    tallygate("team", "create", "Web shop")
    for name in ("production", "a key with a rather long name for what it is"):
        tallygate("key", "create", "--team", "Web shop", "--name", name)
    ids = [line.split("\t")[0] for line in tallygate("key", "list")[1].splitlines()[1:]]
    shown = at_a_terminal(width, "key", "list", "--data-dir", str(base_dir))
    assert len(ids) == 2
    assert all(key_id in shown for key_id in ids)
    assert all(len(line) <= width for line in shown.splitlines())


def at_a_terminal(width: int, *words: str) -> str:
    """What `tallygate WORDS` writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"COLUMNS": str(width)}
    command = [sys.executable, "-P", "-m", "proxy.cli", *words]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the last one has closed the terminal
                break
            if not piece:
                break
            written += piece
        assert process.wait(60) == 0
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("usage", "no usage yet, at any time\n"),
        ("usage --month 2026-01 --model m", "no usage in 2026-01, model m\n"),
        ("usage --from 2026-01-01 --to 2026-02-01", "no usage from 2026-01-01 to 2026-02-01\n"),
        ("suspense list", "nothing is in suspense\n"),
        ("report acceptance", "no draft was judged yet\n"),
        ("report canary --model m", "no requests for m yet\n"),
        ("team list", "no teams yet: tallygate team create NAME\n"),
    ],
)
def test_where_there_is_nothing_one_line_says_so(tallygate: Run, words: str, told: str) -> None:
    code, out, err = tallygate(*words.split())
    assert (code, len(out.splitlines()), err) == (0, 1, told)


def test_a_second_team_of_one_name_is_refused_and_the_first_named(tallygate: Run, admin: Admin) -> None:
    first = admin.team("Web shop")
    code, out, err = tallygate("team", "create", "Web shop")
    assert (code, out) == (1, "")
    assert f"team {first} is named 'Web shop' already" in err
    answer = admin.client.post("/teams", json={"name": "Web shop"})
    assert (answer.status_code, first in answer.json()["error"]["message"]) == (409, True)
    assert tallygate("topup", "5", "--team", "Web shop", "--reference", "r")[0] == 0
    assert tallygate("team", "create", "Web shop", "--allow-same-name")[0] == 0


def test_the_same_idempotent_creation_again_is_the_same_team(admin: Admin) -> None:
    headers = {"idempotency-key": "one"}
    made: list[httpx.Response] = [
        admin.client.post("/teams", json={"name": "Web shop"}, headers=headers) for _ in range(2)
    ]
    assert [answer.status_code for answer in made] == [201, 201]
    assert made[0].json()["id"] == made[1].json()["id"]


def test_a_new_team_says_whose_midnights_it_is_billed_by(tallygate: Run) -> None:
    assert "midnight in Asia/Shanghai; --timezone chooses another" in tallygate("team", "create", "a")[2]
    assert "midnight in UTC" in tallygate("team", "create", "b", "--timezone", "UTC")[2]


def test_quota_set_says_what_it_added_kept_and_removed(tallygate: Run) -> None:
    tallygate("team", "create", "t")
    set_ = ("quota", "set", "--team", "t")
    assert _changes(tallygate(*set_, "requests/minute=60", "concurrency=8")[1]) == {
        ("added", "requests", "60"),
        ("added", "concurrency", "8"),
    }
    assert _changes(tallygate(*set_, "requests/minute=90", "concurrency=8")[1]) == {
        ("added", "requests", "90"),
        ("removed", "requests", "60"),
        ("kept", "concurrency", "8"),
    }
    assert _changes(tallygate(*set_, "--clear")[1]) == {
        ("removed", "requests", "90"),
        ("removed", "concurrency", "8"),
    }


def _changes(out: str) -> set[tuple[str, str, str]]:
    header, *lines = (line.split("\t") for line in out.splitlines())
    places = [header.index(name) for name in ("change", "metric", "limit")]
    found = {(line[places[0]], line[places[1]], line[places[2]]) for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize("words", ["topup -5", "refund -5", "grant -5 --expires 2099-01-01"])
def test_a_negative_amount_says_how_corrections_go(tallygate: Run, words: str) -> None:
    tallygate("team", "create", "t")
    code, _, err = tallygate(*words.split(), "--team", "t", "--reference", "r")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "amounts are positive, not -5: pay back with `tallygate refund`" in err
    assert tallygate("topup", "5", "--team", "t", "--reference", "r", "--colour", "red")[0] == 2


def test_a_new_key_says_that_it_is_shown_once(tallygate: Run) -> None:
    tallygate("team", "create", "t")
    assert tallygate("key", "create", "--team", "t")[2] == "the key is shown this once: keep it\n"
    assert tallygate("key", "create", "--team", "t", "--json")[2] == ""
