"""`tallygate quota …`: limits, written as METRIC[/WINDOW][@MODEL]=LIMIT."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    DataDirOption,
    Fail,
    JsonOption,
    ReasonOption,
    act,
    currency_of,
    print_json,
    print_listing,
    print_table,
    settings_in_use,
)

if TYPE_CHECKING:
    from proxy.admin.endpoints import Call, Listing
    from proxy.admin.quotas import QuotaAnswer, QuotaBody

quota = typer.Typer(no_args_is_help=True, help="Quotas: limits on requests, tokens, spend or concurrency.")

TeamOption = Annotated[str | None, typer.Option(help="Of this team, by id or name.")]
KeyOption = Annotated[str | None, typer.Option(help="Of this key, by id.")]
UserOption = Annotated[str | None, typer.Option(help="Of this end user of --team.")]
COLUMNS = ("scope", "metric", "window", "limit", "currency", "model", "hard", "team_id", "key_id", "end_user")

_RULE = re.compile(
    r"(?P<metric>[a-z]+)(?:/(?P<window>[a-z]+))?(?:@(?P<model>[^=]+))?"
    r"=(?P<limit>[0-9]+(?:\.[0-9]+)?)(?P<currency>[A-Za-z]{3})?(?P<soft>:soft)?"
)
_SPELLING = 'write METRIC/WINDOW[@MODEL]=LIMIT, for example "requests/minute=60", "spend/month=50CNY", "concurrency=8"'


@quota.command("set", epilog='Example: tallygate quota set --team "Web shop" requests/minute=60 spend/month=50CNY')
def set_(
    rules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RULE…", help="requests/minute=60, tokens/day=1000000, spend/month=50CNY, concurrency=8"
        ),
    ] = None,
    team: TeamOption = None,
    key: KeyOption = None,
    user: UserOption = None,
    clear: Annotated[bool, typer.Option(help="Replace the list by an empty one.")] = False,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Replace all quotas of everyone, a team, a key or an end user; prints what was added, kept and removed.

    Append :soft for a limit that only warns.
    """

    if not rules and not clear:
        raise Fail(f"give the quotas, or --clear to remove them all: {_SPELLING}", 2)
    if rules and clear:
        raise Fail("either quotas or --clear", 2)
    body = [_parse(rule) for rule in rules or ()]
    path = _scope(team, key, user)
    settings = settings_in_use(config, data_dir, json_)
    found, before = act(settings, _replace, body=body, reason=reason, writes=True, path=path)
    if json_:
        print_json(found)
        return
    rows = _changes(before, found.data)
    print_table(("change", *COLUMNS), rows, "there are no quotas here now", brief=("change", *COLUMNS[1:7]))


async def _replace(call: Call) -> tuple[Listing[QuotaAnswer], list[QuotaAnswer]]:
    """The new list, and the one before."""
    from ledger import audit
    from proxy.admin import quotas

    await audit.lock(call.c)
    before = (await quotas.get(call)).data
    return await quotas.replace(call), before


def _changes(before: list[QuotaAnswer], after: list[QuotaAnswer]) -> list[tuple[Any, ...]]:
    groups = (
        ("added", [item for item in after if item not in before]),
        ("kept", [item for item in after if item in before]),
        ("removed", [item for item in before if item not in after]),
    )
    return [(change, *(getattr(item, name) for name in COLUMNS)) for change, items in groups for item in items]


@quota.command("list", epilog='Example: tallygate quota list --team "Web shop"')
def list_(
    team: TeamOption = None,
    key: KeyOption = None,
    user: UserOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List the quotas of everyone, a team, a key or an end user."""
    from proxy.admin import quotas

    found = act(settings_in_use(config, data_dir, json_), quotas.get, path=_scope(team, key, user))
    print_listing(found, COLUMNS, json_, "no quotas here: tallygate quota set --help", brief=COLUMNS[1:7])


def _scope(team: str | None, key: str | None, user: str | None) -> dict[str, str]:
    if key is not None and (team is not None or user is not None):
        raise Fail("either --key or --team", 2)
    if user is not None and team is None:
        raise Fail("--user needs --team", 2)
    return {name: value for name, value in (("team", team), ("key", key), ("user", user)) if value is not None}


def _parse(rule: str) -> QuotaBody:
    import msgspec

    from proxy.admin.quotas import QuotaBody

    found = _RULE.fullmatch(rule)
    if found is None:
        raise Fail(f"{rule!r} is not a quota: {_SPELLING}", 2)
    fields: dict[str, Any] = {name: found[name] for name in ("metric", "window", "model", "limit")}
    if found["currency"] is not None:
        fields["currency"] = currency_of(found["currency"])
    try:
        return msgspec.convert(fields | {"hard": found["soft"] is None}, QuotaBody)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "").replace("$.", "")
        raise Fail(f"{rule!r} is not a quota: {reason}; {_SPELLING}", 2) from None
