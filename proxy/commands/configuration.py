"""`tallygate config check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxy.commands.options import HERE, DataDirOption, JsonOption, print_json, say, settings_of

app = typer.Typer(no_args_is_help=True, help="Look at a configuration.")


@app.command("check", epilog="Example: tallygate config check tallygate.yaml")
def check(
    file: Annotated[Path, typer.Argument(help="The YAML file.")],
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Validate a configuration; every problem is one line with file and line number, exit code 2."""
    from proxy.settings import SettingsError

    try:
        settings = settings_of(file, data_dir)
    except SettingsError as error:
        if json_:
            print_json({"ok": False, "errors": error.lines})
            raise typer.Exit(2) from None
        raise
    models = ", ".join(settings.models) or "none"
    if json_:
        print_json({"ok": True, "errors": [], "models": list(settings.models), "upstreams": list(settings.upstreams)})
    else:
        say(f"{file} is valid; models: {models}")
