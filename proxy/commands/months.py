"""`tallygate month …`: the end of a billing month."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    CursorOption,
    DataDirOption,
    Fail,
    JsonOption,
    LimitOption,
    ReasonOption,
    act,
    by_operator,
    ledger_of,
    print_json,
    print_listing,
    print_table,
    progress,
    run,
    say,
    settings_in_use,
)

if TYPE_CHECKING:
    from ledger.months import Month
    from proxy.settings import Settings

month = typer.Typer(no_args_is_help=True, help="Billing months: close them, and see which are closed.")

COLUMNS = ("month", "timezone", "state", "closed_at")
WaitOption = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for running slots.")]


@month.command("close", epilog="Example: tallygate month close --month 2026-11")
def close(
    month: Annotated[str, typer.Option(help="YYYY-MM. It must be over in the time zone.")],
    team: Annotated[str | None, typer.Option(help="Only the time zone of this team.")] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option(help="Do not wait for this slot; what it still brings is billed later. Needs --reason."),
    ] = None,
    wait: WaitOption = 30.0,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Close a month for all teams of a time zone: nothing is added to it any more. Again: nothing changes."""
    from proxy.admin.months import MonthAnswer

    if leave_out and not reason:
        raise Fail("say with --reason why a slot is left out; it is kept in the audit chain", 2)
    settings = settings_in_use(config, data_dir, json_)
    found = run(close_months(settings, month, team, leave_out or [], wait, reason))
    answers = [MonthAnswer.of(item) for item in found]
    if json_:
        print_json({"data": answers})
    else:
        print_table(COLUMNS, [[getattr(item, name) for name in COLUMNS] for item in answers], "there is no team yet")
        for item in answers:
            for words in item.waiting_for:
                say(f"{item.timezone}: {words}")
    if any(item.state != "closed" for item in answers):
        raise typer.Exit(1)


async def close_months(
    settings: Settings, month: str, team: str | None, leave_out: list[str], wait_s: float, reason: str | None
) -> list[Month]:
    from ledger.months import close_patiently, zones_of_teams
    from ledger.periods import next_period
    from ledger.teams import find_team

    next_period(month)  # raises Invalid for what is no month
    async with ledger_of(settings) as db, progress(f"closing {month}") as step:
        async with db.read() as c:
            zones = await zones_of_teams(c) if team is None else [(await find_team(c, team)).timezone]
        by = by_operator(reason)
        return await close_patiently(db, by, month, zones, patience_s=wait_s, leave_out=leave_out, progress=step)


@month.command("list", epilog="Example: tallygate month list")
def list_(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Months that are closing or closed, newest first."""
    from proxy.admin import months
    from proxy.admin.endpoints import Paging

    query = Paging(limit=limit, cursor=cursor)
    found = act(settings_in_use(config, data_dir, json_), months.list_, query=query)
    print_listing(found, COLUMNS, json_, "none yet: tallygate month close --month YYYY-MM")
