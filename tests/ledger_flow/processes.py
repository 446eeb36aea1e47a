"""Starting spenders as processes, and reading what they wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ledger_flow.material import House
from tests.services import ROOT


@dataclass(frozen=True)
class Line:
    kind: str
    """S: the upstream produced it · D: the ledger gave a receipt · R: refused · U: unavailable."""
    request_id: str
    first: int
    second: int


def spender(house: House, slot: int, *options: str) -> subprocess.Popen[bytes]:
    folder = house.journal_dir.parent
    described = folder / "house.json"
    given = {name: getattr(house, name) for name in ("team_id", "key_id", "currency", "timezone")}
    described.write_text(json.dumps(given))
    url = house.db.engine.url.render_as_string(hide_password=False).replace("+aiosqlite", "").replace("+asyncpg", "")
    command = [sys.executable, "-m", "tests.ledger_flow.spender", url, house.journal_dir, slot, described]
    log = folder / f"spender-{slot}.log"
    return subprocess.Popen([*map(str, command), str(log), *options], cwd=ROOT)


def lines(folder: Path, slot: int | None = None) -> Iterator[Line]:
    """The whole lines: a spender may be writing, and a write over two pages of the file is seen in halves."""
    for path in sorted(folder.glob(f"spender-{'*' if slot is None else slot}.log")):
        for line in path.read_text().split("\n")[:-1]:
            kind, request_id, first, second = line.split()
            yield Line(kind, request_id, int(first), int(second))
