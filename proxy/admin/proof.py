"""The proof that usage, transfers, balances, journals and invoices are the same numbers."""

from __future__ import annotations

from ledger.verify import Report, verify
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Strict
from proxy.admin.invoices import Month


class Proof(Strict, frozen=True, kw_only=True):
    """Everything, or one billing month."""

    month: Month | None = None


async def prove(call: Call) -> Report:
    """Beside a live server: what is journalled and not yet posted is counted, not held against it."""
    body: Proof = call.body
    return await verify(call.db, call.installation.journal_dir, body.month)


ENDPOINTS = [
    Endpoint(
        "POST",
        "/verify",
        "Prove that everything adds up",
        prove,
        Report,
        EVERYONE,
        body=Proof,
        body_optional=True,
        only_reads=True,
    ),
]
