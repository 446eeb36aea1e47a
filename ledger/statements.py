"""A month's statement as a value: exact lines in, whole cents out, once. No I/O.

Rounding happens here and nowhere else: `carry_in + exact = billed + carry_out` with 0 ≤ carry < 1 cent (or fen), so
that Σ billed ≤ Σ exact < Σ billed + 1 cent for ever. Lines get their cents by largest remainder, so they foot.
Only the billing currency is rounded; the other one is shown exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from ledger.money import PICO_PER_CENT, Currency, floor_to_cent

LineKind = Literal["usage", "waived", "carry_in"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model, meter and price version. Waived lines are negative: what was used and is not billed."""

    kind: LineKind
    model: str = ""
    meter: str = ""
    price_version: str = ""
    tokens: int = 0
    usd_pico_per_token: int = 0
    cny_pico_per_token: int = 0
    usd_pico: int
    cny_pico: int
    billed_pico: int = 0
    """Whole cents or fen of the billing currency; the lines' sum is the statement's `billed_pico`."""


class TopupLine(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: int
    amount_pico: int
    provider: str
    reference: str


class FxLine(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange rate that priced this month: 1 USD = numerator / denominator CNY."""

    base: str
    quote: str
    numerator: int
    denominator: int
    effective_from_ms: int
    price_version: str


class Party(msgspec.Struct, frozen=True, kw_only=True):
    team_id: str
    name: str
    invoice_title: str | None
    tax_id: str | None
    tax_rate_bp: int


class TokenTotals(msgspec.Struct, frozen=True, kw_only=True):
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    billed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """All that a document of the month says. `*_pico` without a currency in the name is in `currency`."""

    period: str
    timezone: str
    period_start_ms: int
    period_end_ms: int
    currency: Currency
    party: Party
    state: str = "draft"
    number: str | None = None
    issued_ms: int | None = None
    lines: tuple[Line, ...]
    topups: tuple[TopupLine, ...]
    fx: tuple[FxLine, ...]
    tokens: TokenTotals
    opening_pico: int
    topups_pico: int
    exact_pico: int
    carry_in_pico: int
    billed_pico: int
    carry_out_pico: int
    closing_pico: int
    net_pico: int
    tax_pico: int
    exact_usd_pico: int
    exact_cny_pico: int
    merkle_root: str | None = None


def build_statement(
    *,
    period: str,
    timezone: str,
    period_start_ms: int,
    period_end_ms: int,
    currency: Currency,
    party: Party,
    lines: Sequence[Line],
    topups: Sequence[TopupLine],
    fx: Sequence[FxLine],
    tokens: TokenTotals,
    opening_pico: int,
    carry_in_pico: int,
    merkle_root: str | None = None,
) -> Statement:
    """Round, foot and close the month. `lines` are exact; their `billed_pico` is set here."""
    exact_usd, exact_cny = sum(line.usd_pico for line in lines), sum(line.cny_pico for line in lines)
    exact = exact_usd if currency == "USD" else exact_cny
    billed, carry_out = floor_to_cent(carry_in_pico + exact)
    if carry_in_pico:
        usd, cny = (carry_in_pico, 0) if currency == "USD" else (0, carry_in_pico)
        lines = [*lines, Line(kind="carry_in", usd_pico=usd, cny_pico=cny)]
    topups_pico = sum(topup.amount_pico for topup in topups)
    net, tax = split_tax(billed, party.tax_rate_bp)
    return Statement(
        period=period,
        timezone=timezone,
        period_start_ms=period_start_ms,
        period_end_ms=period_end_ms,
        currency=currency,
        party=party,
        lines=tuple(foot_lines(lines, billed, currency)),
        topups=tuple(topups),
        fx=tuple(fx),
        tokens=tokens,
        opening_pico=opening_pico,
        topups_pico=topups_pico,
        exact_pico=exact,
        carry_in_pico=carry_in_pico,
        billed_pico=billed,
        carry_out_pico=carry_out,
        closing_pico=opening_pico + topups_pico - exact,
        net_pico=net,
        tax_pico=tax,
        exact_usd_pico=exact_usd,
        exact_cny_pico=exact_cny,
        merkle_root=merkle_root,
    )


def foot_lines(lines: Sequence[Line], billed_pico: int, currency: Currency) -> list[Line]:
    """Give every line whole cents so that they sum to `billed_pico`, by largest remainder (ties: first line first)."""
    amounts = [line.usd_pico if currency == "USD" else line.cny_pico for line in lines]
    floors = [floor_to_cent(amount) for amount in amounts]
    missing = (billed_pico - sum(cents for cents, _ in floors)) // PICO_PER_CENT
    assert 0 <= missing <= len(lines), "the lines' exact sum is less than one cent above what is billed"
    by_remainder = sorted(range(len(lines)), key=lambda i: (-floors[i][1], i))
    extra = set(by_remainder[:missing])
    return [
        msgspec.structs.replace(line, billed_pico=floors[i][0] + (PICO_PER_CENT if i in extra else 0))
        for i, line in enumerate(lines)
    ]


def split_tax(gross_pico: int, tax_rate_bp: int) -> tuple[int, int]:
    """(net, tax) of a gross amount that includes tax: net = HALF_UP(gross / (1 + rate)) in whole cents."""
    gross_cents = gross_pico // PICO_PER_CENT
    divisor = 10_000 + tax_rate_bp
    net_cents = (2 * gross_cents * 10_000 + divisor) // (2 * divisor)
    return net_cents * PICO_PER_CENT, gross_pico - net_cents * PICO_PER_CENT
