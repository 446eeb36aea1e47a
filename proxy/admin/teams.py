"""Teams, what they paid in, and what they have left."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from ledger import accounts, audit, teams, topups
from ledger.errors import Conflict
from ledger.money import Currency, format_amount, parse_amount
from ledger.teams import Team, TeamChange
from ledger.topups import TopUp
from proxy.admin.endpoints import EVERYONE, FINANCE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.times import Instant, iso, parse_instant, required_iso

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class NewTeam(Strict, frozen=True, kw_only=True):
    """Amounts are decimal strings; `tax_rate_bp` is in basis points (600 = 6 %)."""

    name: Name
    billing_currency: Currency = "USD"
    timezone: str | None = None
    credit_limit: str = "0"
    invoice_title: str | None = None
    tax_id: str | None = None
    tax_rate_bp: int = 0
    plan: str | None = None
    allow_same_name: bool = False
    """Of two teams with one name neither is found by it."""


class TeamPatch(Strict, frozen=True, kw_only=True):
    """What is absent stays; null clears."""

    name: Name | UnsetType = UNSET
    timezone: str | UnsetType = UNSET
    credit_limit: str | UnsetType = UNSET
    invoice_title: str | UnsetType | None = UNSET
    tax_id: str | UnsetType | None = UNSET
    tax_rate_bp: int | UnsetType = UNSET
    plan: str | UnsetType | None = UNSET


class TeamAnswer(msgspec.Struct, frozen=True):
    id: str
    name: str
    billing_currency: str
    timezone: str
    credit_limit: str
    invoice_title: str | None
    tax_id: str | None
    tax_rate_bp: int
    plan: str | None
    created_at: str

    @classmethod
    def of(cls, team: Team) -> TeamAnswer:
        return cls(
            team.id,
            team.name,
            team.billing_currency,
            team.timezone,
            format_amount(team.credit_limit_pico),
            team.invoice_title,
            team.tax_id,
            team.tax_rate_bp,
            team.plan,
            required_iso(team.created_ms),
        )


class NewTopUp(Strict, frozen=True, kw_only=True):
    """`reference` is unique: the same payment sent twice is credited once."""

    amount: str
    currency: Currency | None = None
    reference: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    note: str | None = None


class TopUpAnswer(msgspec.Struct, frozen=True):
    id: str
    team_id: str
    amount: str
    currency: str
    provider: str
    reference: str
    note: str | None
    created_at: str

    @classmethod
    def of(cls, payment: TopUp) -> TopUpAnswer:
        return cls(
            payment.id,
            payment.team_id,
            format_amount(payment.amount_pico),
            payment.currency,
            payment.provider,
            payment.reference,
            payment.note,
            required_iso(payment.at_ms),
        )


class NewGrant(Strict, frozen=True, kw_only=True):
    """Credit that is given, not paid, and ends."""

    amount: str
    currency: Currency | None = None
    reference: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    expires_at: Instant


class GrantAnswer(msgspec.Struct, frozen=True):
    id: str
    team_id: str
    amount: str
    currency: str
    reference: str
    expires_at: str | None


class RefundAnswer(msgspec.Struct, frozen=True):
    id: str
    team_id: str
    amount: str
    currency: str
    reference: str


class BalanceAnswer(msgspec.Struct, frozen=True):
    """`available` can still be spent: prepaid + granted + what is left of the credit; `held` of it is in workers."""

    team_id: str
    currency: str
    available: str
    prepaid: str
    granted: str
    credit_limit: str
    credit_used: str
    held: str


async def create(call: Call) -> TeamAnswer:
    body: NewTeam = call.body
    if not body.allow_same_name:
        await _refuse_a_second(call, body.name)
    team = await teams.create_team(
        call.c,
        call.by,
        body.name,
        billing_currency=body.billing_currency,
        timezone=body.timezone or call.installation.settings.billing.timezone,
        credit_limit_pico=parse_amount(body.credit_limit),
        invoice_title=body.invoice_title,
        tax_id=body.tax_id,
        tax_rate_bp=body.tax_rate_bp,
        plan=body.plan,
    )
    return TeamAnswer.of(team)


async def _refuse_a_second(call: Call, name: str) -> None:
    """Raises Conflict when a team has that name."""
    await audit.lock(call.c)
    first = await teams.named(call.c, name)
    if first is not None:
        raise Conflict(
            f"team {first.id} is named {name!r} already: use it, choose another name, or allow it (`allow_same_name`; "
            "in a shell `--allow-same-name`)"
        )


async def list_(call: Call) -> Listing[TeamAnswer]:
    found = await teams.list_teams(call.c, cursor=call.query.cursor, limit=call.query.limit)
    return Listing([TeamAnswer.of(team) for team in found.items], found.next_cursor)


async def get(call: Call) -> TeamAnswer:
    return TeamAnswer.of(await teams.find_team(call.c, call.path["team"]))


async def patch(call: Call) -> TeamAnswer:
    body: TeamPatch = call.body
    changed: dict[str, Any] = msgspec.structs.asdict(body)
    limit = changed.pop("credit_limit")
    changed["credit_limit_pico"] = UNSET if limit is UNSET else parse_amount(limit)
    team = await teams.find_team(call.c, call.path["team"])
    return TeamAnswer.of(await teams.update_team(call.c, call.by, team.id, TeamChange(**changed)))


async def top_up(call: Call) -> TopUpAnswer:
    body: NewTopUp = call.body
    team = await teams.find_team(call.c, call.path["team"])
    payment = await topups.top_up(
        call.c,
        call.by,
        team.id,
        parse_amount(body.amount),
        currency=body.currency or team.billing_currency,
        reference=body.reference,
        note=body.note,
    )
    return TopUpAnswer.of(payment)


async def list_topups(call: Call) -> Listing[TopUpAnswer]:
    team = await teams.find_team(call.c, call.path["team"])
    found = await topups.list_topups(call.c, team.id, cursor=call.query.cursor, limit=call.query.limit)
    return Listing([TopUpAnswer.of(payment) for payment in found.items], found.next_cursor)


async def grant(call: Call) -> GrantAnswer:
    body: NewGrant = call.body
    team = await teams.find_team(call.c, call.path["team"])
    expires_ms = parse_instant(body.expires_at, "expires_at", team.timezone)
    assert expires_ms is not None
    currency, amount = body.currency or team.billing_currency, parse_amount(body.amount)
    terms: dict[str, Any] = {"currency": currency, "reference": body.reference, "expires_at_ms": expires_ms}
    account_id = await topups.grant(call.c, call.by, team.id, amount, **terms)
    return GrantAnswer(account_id, team.id, format_amount(amount), currency, body.reference, iso(expires_ms))


async def refund(call: Call) -> RefundAnswer:
    body: NewTopUp = call.body
    team = await teams.find_team(call.c, call.path["team"])
    currency, amount = body.currency or team.billing_currency, parse_amount(body.amount)
    transfer_id = await topups.refund(call.c, call.by, team.id, amount, currency=currency, reference=body.reference)
    return RefundAnswer(transfer_id, team.id, format_amount(amount), currency, body.reference)


async def balance(call: Call) -> BalanceAnswer:
    team = await teams.find_team(call.c, call.path["team"])
    return balance_answer(await accounts.balance(call.c, team.id, call.by.at_ms))


def balance_answer(found: accounts.Balance) -> BalanceAnswer:
    return BalanceAnswer(
        found.team_id,
        found.currency,
        format_amount(found.available_pico),
        format_amount(found.prepaid_pico),
        format_amount(found.granted_pico),
        format_amount(found.credit_limit_pico),
        format_amount(found.credit_used_pico),
        format_amount(found.held_pico),
    )


ENDPOINTS = [
    Endpoint("POST", "/teams", "Create a team", create, TeamAnswer, body=NewTeam, status=201),
    Endpoint("GET", "/teams", "List teams", list_, Listing[TeamAnswer], EVERYONE, query=Paging),
    Endpoint("GET", "/teams/{team}", "Get a team, by id or name", get, TeamAnswer, EVERYONE),
    Endpoint("PATCH", "/teams/{team}", "Change a team", patch, TeamAnswer, body=TeamPatch),
    Endpoint(
        "POST", "/teams/{team}/topups", "Credit a payment", top_up, TopUpAnswer, FINANCE, body=NewTopUp, status=201
    ),
    Endpoint("GET", "/teams/{team}/topups", "List payments", list_topups, Listing[TopUpAnswer], EVERYONE, query=Paging),
    Endpoint("POST", "/teams/{team}/grants", "Give credit", grant, GrantAnswer, FINANCE, body=NewGrant, status=201),
    Endpoint("POST", "/teams/{team}/refunds", "Pay back", refund, RefundAnswer, FINANCE, body=NewTopUp, status=201),
    Endpoint("GET", "/teams/{team}/balance", "What a team has left", balance, BalanceAnswer, EVERYONE),
]
