"""Options that every command takes, and what they open: settings, the database, and a way to answer."""

from __future__ import annotations

import asyncio
import getpass
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from ledger.audit import By
    from ledger.database import Database
    from ledger.money import Currency
    from proxy.admin.endpoints import Call, Listing
    from proxy.settings import Settings

T = TypeVar("T")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="TALLYGATE_CONFIG", help="Configuration file (YAML). Default: the bundled model."
    ),
]
DataDirOption = Annotated[
    Path,
    typer.Option("--data-dir", envvar="TALLYGATE_DATA_DIR", help="Base of relative paths; data lies in its `data/`."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Answer as JSON, for machines.")]
LimitOption = Annotated[int, typer.Option(help="At most this many; 1 to 1000.")]
CursorOption = Annotated[str | None, typer.Option(help="Go on where the last list stopped.")]
ReasonOption = Annotated[str | None, typer.Option(help="Why; kept in the audit chain.")]
HERE = Path(".")
COMMAND_TIMEOUT_S = 600.0
"""For one statement of a command: longer than any takes, so that a frozen database does not keep it for ever."""


def settings_of(config: Path | None, data_dir: Path, overrides: Mapping[str, Any] | None = None) -> Settings:
    from proxy.settings import load_settings

    return load_settings(config, data_dir, overrides)


def settings_in_use(config: Path | None, data_dir: Path, json_: bool) -> Settings:
    """What commands on a ledger work with: the named configuration, or else the one that `serve` runs with there.

    Raises SettingsError; Fail when the file is gone that `serve` ran with.
    """
    from proxy.commands.recorded import recorded_config
    from proxy.settings import load_settings

    if config is None:
        config = recorded_config(data_dir.expanduser().absolute())
        if config is not None and not config.exists():
            raise Fail(f"{config}, with which `tallygate serve` ran here, is gone: give --config", 2)
        if config is not None and not json_:
            say(f"with {config}, as `serve` here")
    return load_settings(config, data_dir, asks_others=False)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@asynccontextmanager
async def ledger_of(settings: Settings, *, make: bool = False) -> AsyncIterator[Database]:
    """The database of `settings`. make: when there is none, or an older release's, it is made or migrated.

    Raises Fail when there is none, NotMigrated when it is another release's.
    """
    from ledger.database import Database
    from ledger.migrations import migrate_database, require_current

    if make:
        from proxy.preflight import check_directories

        check_directories(settings)
    else:
        require_ledger(settings)
    db = await Database.open(settings.storage.database, command_timeout_s=COMMAND_TIMEOUT_S)
    try:
        await (migrate_database(db) if make else require_current(db))
        yield db
    finally:
        await db.close()


def require_ledger(settings: Settings) -> None:
    """Raises Fail where the ledger would be a new one, because the directory is the wrong one or the ledger is gone."""
    database = settings.storage.database
    if not database.startswith("sqlite:///"):
        return
    file = Path(database.removeprefix("sqlite:///"))
    if not file.exists():
        usual = file.parent == Path.cwd() / "data" and file.name == "tallygate.db"
        place = "in ./data" if usual else f"at {file}"
        raise Fail(f"no ledger {place}: give --data-dir or --config, or start with `tallygate serve`", 2)


def act(
    settings: Settings,
    endpoint: Callable[[Call], Awaitable[T]],
    *,
    path: Mapping[str, str] | None = None,
    body: Any = None,
    query: Any = None,
    prepared: Any = None,
    reason: str | None = None,
    writes: bool = False,
    hashes: bool = False,
) -> T:
    """Do here what the admin API does: one of its endpoint functions, in one transaction, in the operator's name.

    hashes: it makes a secret that the gateways must know again. Raises StartRefused when this host hashes otherwise.
    """

    async def work() -> T:
        from proxy.admin.endpoints import Call, Installation
        from proxy.seeding import secret_of

        async with ledger_of(settings) as db:
            installation = Installation(settings, await secret_of(settings, db) if hashes else b"")
            async with db.begin() if writes else db.read() as c:
                by, names = by_operator(reason), dict(path or {})
                return await endpoint(Call(installation, db, c, by, names, query, body, prepared))

    return run(work())


def by_operator(reason: str | None = None) -> By:
    """The person at this shell, for the audit chain."""
    from ledger.audit import By

    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"
    return By(f"cli:{user}", now_ms(), reason)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Fail(Exception):
    """Ends the command: one line on standard error, and an exit code (1: the answer is no; 2: wrongly asked)."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def print_json(value: Any) -> None:
    import msgspec

    text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, indent=2)
    sys.stdout.write(text + "\n")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str, *, brief: Sequence[str] | None = None
) -> None:
    """On a terminal what fits it; in a pipe tab-separated lines after a header. brief: the columns for a terminal.

    empty: what to say, on standard error, where there is no row.
    """
    from proxy.commands import tables

    shown = [[tables.cell(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        sys.stdout.writelines(line + "\n" for line in tables.tab_separated(columns, shown))
    elif shown:
        if brief is not None:
            places = [columns.index(name) for name in brief]
            columns, shown = brief, [[row[place] for place in places] for row in shown]
        width = shutil.get_terminal_size().columns
        sys.stdout.writelines(line + "\n" for line in tables.for_terminal(columns, shown, width))
    if not shown and empty:
        say(empty)


def print_record(record: Any, json_: bool) -> None:
    """One thing: JSON, or a line for each field."""
    if json_:
        print_json(record)
    else:
        print_fields((name, getattr(record, name)) for name in record.__struct_fields__)


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """A line for each: name and value."""
    from proxy.commands import tables

    shown = [(name, tables.cell(value)) for name, value in fields]
    width = max((len(name) for name, _ in shown), default=0) if sys.stdout.isatty() else 0
    for name, text in shown:
        sys.stdout.write((f"{name:<{width}}  {text}".rstrip() if width else f"{name}\t{text}") + "\n")


def print_listing(
    found: Listing[Any], columns: Sequence[str], json_: bool, empty: str, *, brief: Sequence[str] | None = None
) -> None:
    """A page of things: JSON, or a table of some of their fields."""
    if json_:
        print_json(found)
        return
    rows = [[getattr(item, name) for name in columns] for item in found.data]
    print_table(columns, rows, empty, brief=brief)
    print_more(found.next_cursor)


def currency_of(text: str) -> Currency:
    """Raises Fail for anything but a currency that the ledger keeps."""
    from ledger.money import CURRENCIES

    for currency in CURRENCIES:
        if text.upper() == currency:
            return currency
    raise Fail(f"unknown currency {text}: use {' or '.join(CURRENCIES)}", 2)


def print_more(cursor: str | None) -> None:
    """Where the list goes on, on standard error."""
    if cursor is not None:
        say(f"more: --cursor {cursor}")


def say(text: str) -> None:
    """One line of running commentary, on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@asynccontextmanager
async def progress(label: str) -> AsyncIterator[Callable[[str], None]]:
    """A spinner on standard error while something long runs; silent when that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status(label) as status:
        yield lambda text: status.update(f"{label}: {text}")
