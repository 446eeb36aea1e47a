"""Promises about what nobody else gets to see: no prompt, key or stored value in a log line, wherever it is written."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from ledger.database import Database

FAILS = """
import logging, structlog
from proxy.logs import configure_logging
configure_logging()
def fail(prompt):
    raise ValueError("boom")
for say in (structlog.get_logger().error, logging.getLogger("any").error):
    try:
        fail("the " + "secret prompt")
    except ValueError as error:
        say("request_failed", exc_info=error)
"""


def _on_a_terminal(code: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 65_536):
            said += data
    except OSError:  # Linux says so when the last writer has gone
        pass
    assert process.wait() == 0
    return said.decode()


def test_a_traceback_shows_no_local_variables_on_a_terminal_or_elsewhere() -> None:
    piped = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, check=True).stderr
    for said in (_on_a_terminal(FAILS), piped):
        assert said.count("boom") >= 2
        assert "in fail" in said
        assert "secret prompt" not in said


async def test_an_error_of_the_database_shows_no_values(tmp_path: Path) -> None:
    db = await Database.open(f"sqlite:///{tmp_path}/x.db")
    with pytest.raises(DBAPIError) as caught:
        async with db.begin() as c:
            await c.execute(text("INSERT INTO nowhere VALUES (:answer)"), {"answer": "what the model said"})
    assert "what the model said" not in str(caught.value)
    await db.close()
