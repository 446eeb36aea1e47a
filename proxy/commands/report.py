"""`tallygate report …`: figures that a decision is made on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    DataDirOption,
    JsonOption,
    act,
    print_json,
    print_listing,
    print_table,
    settings_in_use,
)

if TYPE_CHECKING:
    from proxy.admin.report import Comparison

report = typer.Typer(no_args_is_help=True, help="Figures that a decision is made on.")


@report.command("canary", epilog="Example: tallygate report canary --model deepseek-v3.2 --from 2026-12-01")
def canary(
    model: Annotated[str, typer.Option(help="The model whose deployments are compared.")],
    team: Annotated[str | None, typer.Option(help="Only this team's requests.")] = None,
    start: Annotated[str | None, typer.Option("--from", help="From this date or time on.")] = None,
    to: Annotated[str | None, typer.Option(help="Up to this date or time, itself excluded.")] = None,
    change: Annotated[str | None, typer.Option(help="What was before this date or time, and what came after.")] = None,
    by_draft: Annotated[bool, typer.Option("--by-draft", help="Each draft model apart.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Before and after: the deployments of a model side by side."""
    from proxy.admin.report import CanaryQuery, compare

    query = CanaryQuery(model=model, team=team, from_=start, to=to, change=change, by_draft=by_draft)
    found = act(settings_in_use(config, data_dir, json_), compare, query=query)
    if json_:
        print_json(found)
        return
    columns = ("deployment", *(item.deployment for item in found.data))
    print_table(columns, _rows(found.data), f"no requests for {model} yet")


@report.command("acceptance", epilog="Example: tallygate report acceptance")
def acceptance(config: ConfigOption = None, data_dir: DataDirOption = HERE, json_: JsonOption = False) -> None:
    """How drafts do: healthy from 70 % accepted on, wrong_draft below 50 %, watch between."""
    from proxy.admin.report import acceptance as look

    columns = ("deployment", "draft_model", "state", "acceptance_rate", "draft_tokens", "since")
    print_listing(act(settings_in_use(config, data_dir, json_), look), columns, json_, "no draft was judged yet")


def _rows(compared: list[Comparison]) -> list[tuple[object, ...]]:
    """One line a figure, one column a deployment."""
    if not compared:
        return []
    figures = [name for name in compared[0].__struct_fields__ if name != "deployment"]
    return [(name, *(getattr(item, name) for item in compared)) for name in figures]
