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

LineKind = Literal["usage", "waived", "promo", "carry_in", "credit"]
StatementKind = Literal["invoice", "credit_note"]
MovementKind = Literal["grant", "expiry", "payment", "credit_note", "correction"]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model, meter and price version. Waived lines are negative: what was used and is not billed. So are
    promo lines (what promo credit paid) and the credit of a credit note; both are in the billing currency alone."""

    kind: LineKind
    late_of: str = ""
    """The closed month in which it was used; empty: this month."""
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
    note: str = ""


class TopupLine(msgspec.Struct, frozen=True, kw_only=True):
    at_ms: int
    amount_pico: int
    provider: str
    reference: str


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """Money of the team that moved without being used or topped up. Negative: promo credit that expired.

    A correction of a balance has two that come to nothing: what the balance was off by, and that put right."""

    kind: MovementKind
    at_ms: int
    amount_pico: int
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
    kind: StatementKind = "invoice"
    refers_to: str | None = None
    """The number of the invoice that a credit note is for."""
    movements: tuple[Movement, ...] = ()
    promo_pico: int = 0
    """Of the consumption: paid with promo credit, so not billed. Exact, as the next."""
    on_credit_pico: int = 0
    """Of the consumption: drawn on the credit line."""
    due_pico: int = 0
    """What is left to be paid of what is billed: whole cents. The rest was paid in advance."""

    @property
    def consumption_pico(self) -> int:
        """What was used and not waived, whoever pays it; exact."""
        return self.exact_usd_pico if self.currency == "USD" else self.exact_cny_pico

    def moved_pico(self, kind: MovementKind) -> int:
        return sum(movement.amount_pico for movement in self.movements if movement.kind == kind)


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
    movements: Sequence[Movement] = (),
    promo_pico: int = 0,
    on_credit_pico: int = 0,
    not_invoiced_pico: int = 0,
) -> Statement:
    """Round, foot and close the month. `lines` are exact; their `billed_pico` is set here.

    not_invoiced_pico: what was ever drawn on the credit line and no earlier invoice asks for; exact.
    """
    exact_usd, exact_cny = sum(line.usd_pico for line in lines), sum(line.cny_pico for line in lines)
    consumption = exact_usd if currency == "USD" else exact_cny
    exact = consumption - promo_pico
    billed, carry_out = floor_to_cent(carry_in_pico + exact)
    lines = [*lines, *_in_currency("promo", -promo_pico, currency), *_in_currency("carry_in", carry_in_pico, currency)]
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
        closing_pico=opening_pico + topups_pico + sum(movement.amount_pico for movement in movements) - consumption,
        net_pico=net,
        tax_pico=tax,
        exact_usd_pico=exact_usd,
        exact_cny_pico=exact_cny,
        merkle_root=merkle_root,
        movements=tuple(movements),
        promo_pico=promo_pico,
        on_credit_pico=on_credit_pico,
        due_pico=max(0, min(billed, floor_to_cent(not_invoiced_pico)[0])),
    )


def _in_currency(kind: LineKind, pico: int, currency: Currency) -> list[Line]:
    """A line that has no amount in the other currency; none for nothing."""
    if not pico:
        return []
    usd, cny = (pico, 0) if currency == "USD" else (0, pico)
    return [Line(kind=kind, usd_pico=usd, cny_pico=cny)]


def build_credit_note(invoiced: Statement, amount_pico: int, reason: str, *, number: str, at_ms: int) -> Statement:
    """The statement of a credit of whole cents on what was `invoiced`. It is outside the carry."""
    net, tax = split_tax(amount_pico, invoiced.party.tax_rate_bp)
    (line,) = _in_currency("credit", -amount_pico, invoiced.currency)
    return Statement(
        period=invoiced.period,
        timezone=invoiced.timezone,
        period_start_ms=invoiced.period_start_ms,
        period_end_ms=invoiced.period_end_ms,
        currency=invoiced.currency,
        party=invoiced.party,
        state="finalized",
        number=number,
        issued_ms=at_ms,
        lines=(msgspec.structs.replace(line, billed_pico=-amount_pico, note=reason),),
        topups=(),
        fx=(),
        tokens=TokenTotals(),
        opening_pico=0,
        topups_pico=0,
        exact_pico=-amount_pico,
        carry_in_pico=0,
        billed_pico=-amount_pico,
        carry_out_pico=0,
        closing_pico=0,
        net_pico=-net,
        tax_pico=-tax,
        exact_usd_pico=line.usd_pico,
        exact_cny_pico=line.cny_pico,
        kind="credit_note",
        refers_to=invoiced.number,
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
