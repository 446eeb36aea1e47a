"""FOCUS CSV: the FinOps Open Cost and Usage Specification (1.2), one row a line, in the billing currency."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime

from ledger.documents.wording import METER_NAMES, describe, unit_price
from ledger.money import format_amount
from ledger.statements import Line, Statement

_COLUMN_NAMES = (
    "BilledCost BillingAccountId BillingAccountName BillingAccountType BillingCurrency BillingPeriodEnd "
    "BillingPeriodStart ChargeCategory ChargeClass ChargeDescription ChargeFrequency ChargePeriodEnd "
    "ChargePeriodStart ConsumedQuantity ConsumedUnit ContractedCost EffectiveCost InvoiceId InvoiceIssuerName "
    "ListCost ListUnitPrice PricingQuantity PricingUnit ProviderName PublisherName ServiceCategory ServiceName SkuId"
)
_CATEGORIES = {"usage": "Usage", "promo": "Credit", "credit": "Credit"}
COLUMNS = tuple(_COLUMN_NAMES.split())


def write_focus(statement: Statement) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\r\n", restval="")
    writer.writeheader()
    for line in statement.lines:
        writer.writerow(_row(statement, line))
    return text.getvalue().encode()


def _row(statement: Statement, line: Line) -> dict[str, object]:
    start, end = _iso(statement.period_start_ms), _iso(statement.period_end_ms)
    exact = format_amount(line.usd_pico if statement.currency == "USD" else line.cny_pico)
    row: dict[str, object] = {
        "BilledCost": format_amount(line.billed_pico),
        "BillingAccountId": statement.party.team_id,
        "BillingAccountName": statement.party.name,
        "BillingAccountType": "Team",
        "BillingCurrency": statement.currency,
        "BillingPeriodStart": start,
        "BillingPeriodEnd": end,
        "ChargePeriodStart": start,
        "ChargePeriodEnd": end,
        "ChargeCategory": _CATEGORIES.get(line.kind, "Adjustment"),
        "ChargeDescription": describe(line),
        "ChargeFrequency": "Usage-Based" if line.kind == "usage" else "One-Time",
        "ContractedCost": exact,
        "EffectiveCost": exact,
        "ListCost": exact,
        "InvoiceId": statement.number or "",
        "InvoiceIssuerName": "TallyGate",
        "ProviderName": "TallyGate",
        "PublisherName": "TallyGate",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Chat completions",
    }
    if line.kind == "usage":
        row |= {
            "ConsumedQuantity": line.tokens,
            "ConsumedUnit": "Tokens",
            "PricingQuantity": format_amount(line.tokens * 10**6),
            "PricingUnit": "1M Tokens",
            "ListUnitPrice": unit_price(line, statement.currency),
            "SkuId": f"{line.model}/{METER_NAMES[line.meter]}",
        }
    return row


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
