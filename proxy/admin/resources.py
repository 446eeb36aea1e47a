"""Every endpoint of the admin API, in the order of the document."""

from __future__ import annotations

from proxy.admin import (
    audit,
    invoices,
    journals,
    keys,
    months,
    prices,
    proof,
    quotas,
    report,
    routes,
    teams,
    tokens,
    usage,
    webhooks,
)
from proxy.admin.endpoints import Endpoint

ENDPOINTS: list[Endpoint] = [
    *teams.ENDPOINTS,
    *keys.ENDPOINTS,
    *quotas.ENDPOINTS,
    *prices.ENDPOINTS,
    *usage.ENDPOINTS,
    *report.ENDPOINTS,
    *months.ENDPOINTS,
    *routes.ENDPOINTS,
    *invoices.ENDPOINTS,
    *proof.ENDPOINTS,
    *journals.ENDPOINTS,
    *webhooks.ENDPOINTS,
    *audit.ENDPOINTS,
    *tokens.ENDPOINTS,
]
