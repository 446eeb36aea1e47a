"""`tallygate usage` and `request`: what was used, in rows or sums, and one request to the last entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    CursorOption,
    DataDirOption,
    JsonOption,
    LimitOption,
    act,
    print_fields,
    print_json,
    print_listing,
    print_table,
    say,
    settings_in_use,
)

if TYPE_CHECKING:
    from proxy.admin.usage import UsageQuery

ROW_COLUMNS = (
    *("created_at", "request_id", "model", "deployment", "draft_model", "status"),
    *("prompt_tokens", "generated_tokens", "billed_tokens", "cost_usd", "cost_cny"),
)
BRIEF = ("request_id", "created_at", "model", "status", "prompt_tokens", "generated_tokens", "cost_usd")
SUM_COLUMNS = (
    *("requests", "prompt_tokens", "generated_tokens", "billed_tokens", "draft_tokens", "accepted_tokens"),
    *("cost_usd", "cost_cny"),
)
_NAMES = {"team": "team_id", "key": "key_id"}


def usage(
    team: Annotated[str | None, typer.Option(help="Only this team's, by id or name.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key's, by id.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    start: Annotated[str | None, typer.Option("--from", help="From this date or time on.")] = None,
    to: Annotated[str | None, typer.Option(help="Up to this date or time, itself excluded.")] = None,
    month: Annotated[str | None, typer.Option(help="Only this billing month, YYYY-MM.")] = None,
    group_by: Annotated[
        str | None, typer.Option(help="Sums by team, key, model, day, draft_model …; comma-separated.")
    ] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Requests, the newest first, or sums of them."""
    from proxy.admin.usage import UsageQuery, list_usage

    query = UsageQuery(
        team=team, key=key, model=model, period=month, from_=start, to=to, group_by=group_by, limit=limit, cursor=cursor
    )
    found = act(settings_in_use(config, data_dir, json_), list_usage, query=query)
    groups = [_NAMES.get(name.strip(), name.strip()) for name in (group_by or "").split(",") if name.strip()]
    columns = ROW_COLUMNS if group_by is None else (*groups, *SUM_COLUMNS)
    brief = BRIEF if group_by is None else None
    print_listing(found, columns, json_, _nothing(query), brief=brief)


def _nothing(query: UsageQuery) -> str:
    """Where there was no usage: the period that was looked at, and whose."""
    period = f" in {query.period}" if query.period else ""
    period += f" from {query.from_}" if query.from_ else ""
    period += f" to {query.to}" if query.to else ""
    whose = "".join(f", {name} {value}" for name in ("team", "key", "model") if (value := getattr(query, name)))
    page = " on this page" if query.cursor else ""
    return f"no usage{page}{period or ' yet, at any time'}{whose}"


def request(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The x-request-id of the response.")],
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """One request: what it used, what it cost, who paid, and its receipt."""
    from proxy.admin.usage import RequestQuery, get_request

    found = act(settings_in_use(config, data_dir, json_), get_request, query=RequestQuery(), path={"request": request})
    if json_:
        print_json(found)
        return
    usage = found.usage
    print_fields((name, getattr(usage, name)) for name in usage.__struct_fields__)
    rows = [(item.kind, item.source, item.destination, item.amount, item.currency) for item in found.transfers]
    print_table(("transfer", "from", "to", "amount", "currency"), rows, "")
    say(f"its receipt, checked offline: tallygate request {request} --json | python scripts/check_receipt.py")
