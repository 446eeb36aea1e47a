"""What the lines and the figures are called, in English and in Chinese (the words of a 对账单)."""

from __future__ import annotations

from datetime import datetime
from fractions import Fraction

from ledger.money import format_amount, format_price
from ledger.periods import zone
from ledger.statements import FxLine, Line, Statement

METER_NAMES = {
    "input_uncached": "input",
    "cache_read": "input, cache read",
    "cache_write": "input, cache write",
    "output_text": "output",
    "output_reasoning": "output, reasoning",
}


def describe(line: Line) -> str:
    match line.kind:
        case "usage":
            return f"{line.model} {METER_NAMES[line.meter]} tokens"
        case "waived":
            return f"{line.model} used and not billed"
        case "carry_in":
            return "Fraction carried in from the month before"


def summary(statement: Statement) -> list[tuple[str, str, str]]:
    """(name, 中文名, amount): the figures below the lines, in the order of a 对账单."""
    rows = [
        ("Opening balance", "期初余额", statement.opening_pico),
        ("Top-ups", "充值", statement.topups_pico),
        ("Consumption, exact (tax included)", "消费(含税)", statement.exact_pico),
        ("Closing balance", "期末余额", statement.closing_pico),
        ("Fraction carried in", "上期抹零结转", statement.carry_in_pico),
        ("Fraction carried out", "抹零", statement.carry_out_pico),
        ("Net amount", "不含税金额", statement.net_pico),
        ("Tax", "税额", statement.tax_pico),
        ("Total billed", "价税合计", statement.billed_pico),
    ]
    return [(name, chinese, format_amount(pico)) for name, chinese, pico in rows]


def exchange_rate(fx: FxLine, timezone: str) -> str:
    """ "1 USD = 7.3 CNY since 2026-11-01": a decimal where it is finite, else the exact ratio."""
    return f"1 {fx.base} = {_ratio(fx)} {fx.quote} since {local_date(fx.effective_from_ms, timezone)}"


def local_date(at_ms: int, timezone: str) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone(timezone)).strftime("%Y-%m-%d")


def local_time(at_ms: int, timezone: str) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone(timezone)).isoformat(timespec="seconds")


def unit_price(line: Line, currency: str) -> str:
    """Per 1M tokens; empty where a line has none."""
    if line.kind != "usage":
        return ""
    return format_price(line.usd_pico_per_token if currency == "USD" else line.cny_pico_per_token)


def tax_rate(statement: Statement) -> str:
    return f"{format_amount(statement.party.tax_rate_bp * 10**10)} %"


def _ratio(fx: FxLine) -> str:
    scaled = Fraction(fx.numerator, fx.denominator) * 10**12
    return format_amount(int(scaled)) if scaled.denominator == 1 else f"{fx.numerator}/{fx.denominator}"
