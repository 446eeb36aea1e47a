"""`tallygate route …`: who serves a model, for every team or for one, set while everything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    DataDirOption,
    Fail,
    JsonOption,
    ReasonOption,
    act,
    print_json,
    print_record,
    print_table,
    settings_in_use,
)

route = typer.Typer(no_args_is_help=True, help="Routes: how a model's requests are split between its deployments.")

ModelOption = Annotated[str, typer.Option(help="The model, as clients name it.")]
TeamOption = Annotated[str | None, typer.Option(help="Of this team alone, by id or name.")]
COLUMNS = ("model", "team", "weights", "fallback", "set at")


@route.command("set", epilog='Example: tallygate route set --model deepseek-v3.2 --team "Web shop" legacy=100')
def set_(
    weights: Annotated[list[str], typer.Argument(metavar="DEPLOYMENT=WEIGHT…", help="backend=90 legacy=10")],
    model: ModelOption,
    team: TeamOption = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Split a model's requests so from now on; a deployment that is not named gets none. In force within a second."""
    from proxy.admin import routes

    body = routes.RouteBody(model=model, team=team, weights=dict(map(_parse, weights)))
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, routes.set_, body=body, reason=reason, writes=True), json_)


@route.command("clear", epilog="Example: tallygate route clear --model deepseek-v3.2")
def clear(
    model: ModelOption,
    team: TeamOption = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Back to the configured weights (of a team: to those of every team)."""
    from proxy.admin import routes

    query = routes.RouteKey(model=model, team=team)
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, routes.clear, query=query, reason=reason, writes=True), json_)


@route.command("list", epilog="Example: tallygate route list")
def list_(config: ConfigOption = None, data_dir: DataDirOption = HERE, json_: JsonOption = False) -> None:
    """Each model's deployments and weights: as configured, then as they were set."""
    from proxy.admin import routes

    found = act(settings_in_use(config, data_dir, json_), routes.list_)
    if json_:
        print_json(found)
        return
    rows = [
        (item.model, item.team_id, _shown(item.weights), ", ".join(item.fallback), item.set_at) for item in found.data
    ]
    print_table(COLUMNS, rows, "no models are configured")


def _parse(text: str) -> tuple[str, int]:
    name, equals, weight = text.rpartition("=")
    if not equals or not weight.isascii() or not weight.isdigit():
        raise Fail(f"{text!r} is no weight: write DEPLOYMENT=WEIGHT, for example backend=90", 2)
    return name, int(weight)


def _shown(weights: dict[str, int]) -> str:
    return " ".join(f"{name}={weight}" for name, weight in weights.items())
