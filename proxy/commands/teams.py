"""`tallygate team …`, `topup`, `grant`, `balance`: customers and their money."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

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
    currency_of,
    print_listing,
    print_record,
    say,
    settings_in_use,
)

if TYPE_CHECKING:
    from ledger.money import Currency

team = typer.Typer(no_args_is_help=True, help="Teams: the customers that own money and keys.")

TeamArgument = Annotated[str, typer.Argument(metavar="TEAM", help="The team's id or name.")]
TeamOption = Annotated[str, typer.Option("--team", help="The team's id or name.")]
CurrencyOption = Annotated[str | None, typer.Option(help="USD or CNY; default: the team's.")]
ReferenceOption = Annotated[
    str, typer.Option(help="The payment's own reference; credited once, however often it is sent.")
]
TEAM_COLUMNS = ("id", "name", "billing_currency", "timezone", "credit_limit", "created_at")


@team.command("create", epilog='Example: tallygate team create "Web shop" --currency CNY')
def create(
    name: Annotated[str, typer.Argument(help="The team's name.")],
    currency: Annotated[str, typer.Option(help="What it is billed in: USD or CNY.")] = "USD",
    timezone: Annotated[
        str | None, typer.Option(help="Whose months it is billed by; default: billing.timezone.")
    ] = None,
    credit_limit: Annotated[str, typer.Option(help="What it may owe (post-paid).")] = "0",
    invoice_title: Annotated[str | None, typer.Option(help="The name on invoices.")] = None,
    tax_id: Annotated[str | None, typer.Option(help="The tax number on invoices.")] = None,
    tax_rate_bp: Annotated[int, typer.Option(help="Tax rate in basis points; 600 is 6 %.")] = 0,
    plan: Annotated[str | None, typer.Option(help="A price scope, plan:NAME.")] = None,
    allow_same_name: Annotated[
        bool, typer.Option("--allow-same-name", help="Also where a team has that name; both then go by their ids.")
    ] = False,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Create a team."""
    from proxy.admin import teams

    body = teams.NewTeam(
        name=name,
        billing_currency=currency_of(currency),
        timezone=timezone,
        credit_limit=credit_limit,
        invoice_title=invoice_title,
        tax_id=tax_id,
        tax_rate_bp=tax_rate_bp,
        plan=plan,
        allow_same_name=allow_same_name,
    )
    made = act(settings_in_use(config, data_dir, json_), teams.create, body=body, reason=reason, writes=True)
    print_record(made, json_)
    if not json_:
        say(f"its days and months begin at midnight in {made.timezone}; --timezone chooses another")


@team.command("list", epilog="Example: tallygate team list --json")
def list_(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List teams, the oldest first."""
    from proxy.admin import teams
    from proxy.admin.endpoints import Paging

    found = act(settings_in_use(config, data_dir, json_), teams.list_, query=Paging(limit=limit, cursor=cursor))
    print_listing(found, TEAM_COLUMNS, json_, "no teams yet: tallygate team create NAME", brief=TEAM_COLUMNS[:-1])


@team.command("show", epilog='Example: tallygate team show "Web shop"')
def show(
    team: TeamArgument, config: ConfigOption = None, data_dir: DataDirOption = HERE, json_: JsonOption = False
) -> None:
    """Show one team."""
    from proxy.admin import teams

    print_record(act(settings_in_use(config, data_dir, json_), teams.get, path={"team": team}), json_)


@team.command("set", epilog='Example: tallygate team set "Web shop" --credit-limit 500')
def set_(
    team: TeamArgument,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    timezone: Annotated[str | None, typer.Option(help="Only before anything was charged.")] = None,
    credit_limit: Annotated[str | None, typer.Option(help="What it may owe (post-paid).")] = None,
    invoice_title: Annotated[str | None, typer.Option(help="The name on invoices.")] = None,
    tax_id: Annotated[str | None, typer.Option(help="The tax number on invoices.")] = None,
    tax_rate_bp: Annotated[int | None, typer.Option(help="Tax rate in basis points; 600 is 6 %.")] = None,
    plan: Annotated[str | None, typer.Option(help="A price scope, plan:NAME.")] = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Change a team; what is not named stays."""
    from proxy.admin import teams

    wanted: dict[str, Any] = {
        "name": name,
        "timezone": timezone,
        "credit_limit": credit_limit,
        "invoice_title": invoice_title,
        "tax_id": tax_id,
        "tax_rate_bp": tax_rate_bp,
        "plan": plan,
    }
    body = teams.TeamPatch(**{field: value for field, value in wanted.items() if value is not None})
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, teams.patch, body=body, reason=reason, writes=True, path={"team": team}), json_)


def _positive(amount: str, currency: str | None) -> Currency | None:
    """The currency that was named. Raises Fail for an amount below zero: the shell's "-5" is no option of ours."""
    if amount.lstrip().startswith("-"):
        raise Fail(
            f"amounts are positive, not {amount}: pay back with `tallygate refund`, correct a finalized invoice with "
            "`tallygate invoice credit`",
            2,
        )
    return None if currency is None else currency_of(currency)


def topup(
    amount: Annotated[str, typer.Argument(help='A decimal amount such as "100.50".')],
    team: TeamOption,
    reference: ReferenceOption,
    currency: CurrencyOption = None,
    note: Annotated[str | None, typer.Option(help="Kept with the payment.")] = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Credit a payment to a team."""
    from proxy.admin import teams

    wanted = _positive(amount, currency)
    body = teams.NewTopUp(amount=amount, currency=wanted, reference=reference, note=note)
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, teams.top_up, body=body, reason=reason, writes=True, path={"team": team}), json_)


def grant(
    amount: Annotated[str, typer.Argument(help='A decimal amount such as "5".')],
    team: TeamOption,
    reference: ReferenceOption,
    expires: Annotated[str, typer.Option(help="A date or time; unused credit ends then.")],
    currency: CurrencyOption = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Give a team credit that expires."""
    from proxy.admin import teams

    wanted = _positive(amount, currency)
    body = teams.NewGrant(amount=amount, currency=wanted, reference=reference, expires_at=expires)
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, teams.grant, body=body, reason=reason, writes=True, path={"team": team}), json_)


def refund(
    amount: Annotated[str, typer.Argument(help='A decimal amount such as "20".')],
    team: TeamOption,
    reference: ReferenceOption,
    currency: CurrencyOption = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Pay back to a team what is neither spent nor held."""
    from proxy.admin import teams

    wanted = _positive(amount, currency)
    body = teams.NewTopUp(amount=amount, currency=wanted, reference=reference)
    settings = settings_in_use(config, data_dir, json_)
    print_record(act(settings, teams.refund, body=body, reason=reason, writes=True, path={"team": team}), json_)


def balance(
    team: TeamOption, config: ConfigOption = None, data_dir: DataDirOption = HERE, json_: JsonOption = False
) -> None:
    """What a team has left."""
    from proxy.admin import teams

    print_record(act(settings_in_use(config, data_dir, json_), teams.balance, path={"team": team}), json_)
