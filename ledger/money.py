"""Money as integers of pico units (1e-12 of a currency), so that a price per token is an integer.

0.42 USD per 1M tokens is 420 000 pico a token; tokens × price is then exact; nothing is rounded before a document is.
Amounts outside this module are `int` with `_pico` in their names; decimals appear only at the edges, as strings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

Currency = Literal["USD", "CNY"]
CURRENCIES: tuple[Currency, ...] = get_args(Currency)

PICO_PER_UNIT = 10**12
PICO_PER_CENT = 10**10
"""One cent or one fen: the smallest amount a document shows in the billing currency."""
TOKENS_PER_PRICE = 10**6
"""Prices are quoted per this many tokens."""
MAX_SQL_PICO = 2**63 - 1
"""The largest amount that one row may hold in SQLite: about 9.2 million units of a currency."""


_PLAIN = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_MAX_CHARS = 60


class MoneyError(ValueError):
    """An amount that is not a plain decimal, or finer than a pico, or too large. The message says which."""


def parse_amount(text: str) -> int:
    """Pico of a decimal string such as "5.376". Raises MoneyError when it is not exact in pico."""
    return _exact_integer(_decimal(text) * PICO_PER_UNIT, text, "an amount has at most 12 decimals")


def parse_price(text: str) -> int:
    """Pico per token of a price per 1M tokens such as "0.42". Raises MoneyError when it is not exact or negative."""
    value = _decimal(text)
    if value < 0:
        raise MoneyError(f"a price cannot be negative: {text}")
    return _exact_integer(
        value * PICO_PER_UNIT / TOKENS_PER_PRICE, text, "a price per 1M tokens has at most 6 decimals"
    )


def format_amount(pico: int) -> str:
    """A decimal string without exponent and without trailing zeros: 5_376_000_000_000 → "5.376"."""
    sign, units, rest = ("-" if pico < 0 else ""), *divmod(abs(pico), PICO_PER_UNIT)
    if not rest:
        return f"{sign}{units}"
    return f"{sign}{units}.{rest:012d}".rstrip("0")


def format_price(pico_per_token: int) -> str:
    """The price per 1M tokens as a decimal string: 420_000 → "0.42"."""
    return format_amount(pico_per_token * TOKENS_PER_PRICE)


def format_ratio(numerator: int, denominator: int) -> str:
    """A rate as a decimal string, "7.3"; "22/7" when that has no short decimal form."""
    pico, rest = divmod(numerator * PICO_PER_UNIT, denominator)
    return f"{numerator}/{denominator}" if rest else format_amount(pico)


@dataclass(frozen=True, slots=True)
class FxRate:
    """How many units of `quote` one unit of `base` is worth, as an exact ratio: USD_CNY 7.3 = 73/10."""

    base: Currency
    quote: Currency
    ratio: Fraction

    @classmethod
    def parse(cls, base: Currency, quote: Currency, text: str) -> FxRate:
        value = _decimal(text)
        if value <= 0:
            raise MoneyError(f"an exchange rate must be positive: {text}")
        return cls(base, quote, value)

    def convert(self, pico: int) -> tuple[int, bool]:
        """`pico` of base in pico of quote, half to even, and whether that was exact."""
        exact = pico * self.ratio
        return round(exact), exact.denominator == 1


def floor_to_cent(pico: int) -> tuple[int, int]:
    """(whole cents or fen in pico, remainder in pico); the remainder is at least 0 and below one cent."""
    cents, rest = divmod(pico, PICO_PER_CENT)
    return cents * PICO_PER_CENT, rest


def _decimal(text: str) -> Fraction:
    """Of ASCII digits, at most one point and a minus sign: Python itself would read "1_000", " 5" and "５" too."""
    if not isinstance(text, str) or len(text) > _MAX_CHARS or _PLAIN.fullmatch(text) is None:
        raise MoneyError(f'not a plain decimal number: {str(text)[:_MAX_CHARS]!r}; write it like "5.376"')
    return Fraction(text)


def _exact_integer(value: Fraction, text: str, rule: str) -> int:
    if value.denominator != 1:
        raise MoneyError(f"{text} is finer than the ledger keeps: {rule}")
    if abs(value.numerator) >= 10**38:
        raise MoneyError(f"{text} is larger than the ledger keeps")
    return value.numerator
