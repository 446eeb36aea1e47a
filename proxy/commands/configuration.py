"""`tallygate config check`."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    DataDirOption,
    Fail,
    JsonOption,
    ledger_of,
    now_ms,
    print_json,
    run,
    say,
    settings_of,
)

if TYPE_CHECKING:
    from proxy.settings import Settings

NO_MODELS = "none, so nothing would be served: add `models:`"
LOOK_S = 5.0
"""How long a database may take to answer before its prices are not looked at."""

app = typer.Typer(no_args_is_help=True, help="Look at a configuration.")


@app.command("check", epilog="Example: tallygate config check tallygate.yaml")
def check(
    file: Annotated[Path, typer.Argument(help="The YAML file.")],
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Validate a configuration; every problem is one line with file and line number, exit code 2."""
    from proxy.settings import SettingsError
    from proxy.shares import shares

    try:
        settings = settings_of(file, data_dir)
    except SettingsError as error:
        if json_:
            print_json({"ok": False, "errors": error.lines})
            raise typer.Exit(2) from None
        raise
    warnings = run(_warnings(settings))
    if json_:
        names = {"models": list(settings.models), "upstreams": list(settings.upstreams)}
        print_json({"ok": True, "errors": [], "warnings": warnings} | names)
        return
    say(f"{file} is valid; models: {', '.join(settings.models) or NO_MODELS}")
    for line in (*warnings, *shares(settings)):
        say(line)


async def _warnings(settings: Settings) -> list[str]:
    """Configured prices that are not those of the ledger, where there is one that answers."""
    from ledger.errors import LedgerError
    from proxy.charged import prices_in_force

    with contextlib.suppress(Fail, LedgerError, TimeoutError):
        async with asyncio.timeout(LOOK_S), ledger_of(settings) as db, db.read() as c:
            return (await prices_in_force(c, settings, now_ms())).warnings
    return []
