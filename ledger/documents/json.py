"""JSON for programs: amounts as decimal strings without exponent, tokens as integers, instants as ISO 8601."""

from __future__ import annotations

from typing import Any

import msgspec

from ledger.documents.wording import describe, exchange_rate, local_time, unit_price
from ledger.money import format_amount
from ledger.statements import Line, Statement

_TOTALS = ("exact", "carry_in", "billed", "carry_out", "net", "tax", "due")


def write_json(statement: Statement) -> bytes:
    return msgspec.json.format(msgspec.json.encode(as_plain(statement)), indent=2) + b"\n"


def as_plain(statement: Statement) -> dict[str, Any]:
    """The statement as maps, lists, strings and integers, in the order in which one reads it."""
    zone = statement.timezone
    amounts = ("opening", "topups", "consumption", "promo", "on_credit", "closing", *_TOTALS)
    return {
        "kind": statement.kind,
        "number": statement.number,
        "refers_to": statement.refers_to,
        "state": statement.state,
        "period": statement.period,
        "timezone": zone,
        "period_start": local_time(statement.period_start_ms, zone),
        "period_end": local_time(statement.period_end_ms, zone),
        "issued_at": None if statement.issued_ms is None else local_time(statement.issued_ms, zone),
        "currency": statement.currency,
        "team": {
            "id": statement.party.team_id,
            "name": statement.party.name,
            "invoice_title": statement.party.invoice_title,
            "tax_id": statement.party.tax_id,
            "tax_rate": format_amount(statement.party.tax_rate_bp * 10**8),
        },
        "lines": [_line(line) for line in statement.lines],
        "tokens": msgspec.to_builtins(statement.tokens),
        "cost_usd": format_amount(statement.exact_usd_pico),
        "cost_cny": format_amount(statement.exact_cny_pico),
        "amounts": {name: format_amount(getattr(statement, f"{name}_pico")) for name in amounts},
        "topups": [
            {
                "at": local_time(topup.at_ms, zone),
                "amount": format_amount(topup.amount_pico),
                "provider": topup.provider,
                "reference": topup.reference,
            }
            for topup in statement.topups
        ],
        "movements": [
            {
                "at": local_time(movement.at_ms, zone),
                "kind": movement.kind,
                "amount": format_amount(movement.amount_pico),
                "reference": movement.reference,
            }
            for movement in statement.movements
        ],
        "fx": [{"price_version": fx.price_version, "rate": exchange_rate(fx, zone)} for fx in statement.fx],
        "merkle_root": statement.merkle_root,
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "description": describe(line),
        "kind": line.kind,
        "late_of": line.late_of or None,
        "model": line.model,
        "meter": line.meter,
        "price_version": line.price_version,
        "tokens": line.tokens,
        "usd_per_1m": unit_price(line, "USD"),
        "cny_per_1m": unit_price(line, "CNY"),
        "cost_usd": format_amount(line.usd_pico),
        "cost_cny": format_amount(line.cny_pico),
        "billed": format_amount(line.billed_pico),
    }
