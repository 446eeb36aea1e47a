"""The proof that usage, transfers, balances, journals and invoices are the same numbers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ledger.audit import By
from ledger.corrections import Correction, approve, propose
from ledger.verify import Report, verify
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict
from proxy.admin.invoices import Month


class Proof(Strict, frozen=True, kw_only=True):
    """Everything, or one billing month."""

    month: Month | None = None


async def prove(call: Call) -> Report:
    """Beside a live server: what is journalled and not yet posted is counted, not held against it."""
    body: Proof = call.body
    return await verify(call.db, call.installation.journal_dir, body.month)


class Approval(Strict, frozen=True, kw_only=True):
    """`reason` is kept in the audit chain."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


async def list_corrections(call: Call) -> Listing[Correction]:
    """New entries that would put right what is wrong, evidence first; look again after approving."""
    return Listing(await propose(call.db, call.installation.journal_dir))


async def approve_correction(call: Call) -> Correction:
    """Again: the same answer, and nothing is posted twice."""
    body: Approval = call.body
    by = By(call.by.actor, call.by.at_ms, body.reason)
    return await approve(call.db, call.installation.journal_dir, by, call.path["correction"])


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
        own_transactions=True,
    ),
    Endpoint("GET", "/corrections", "Propose corrections", list_corrections, Listing[Correction], EVERYONE),
    Endpoint(
        "POST",
        "/corrections/{correction}/approve",
        "Post a proposed correction",
        approve_correction,
        Correction,
        body=Approval,
        own_transactions=True,  # the proof before it must not keep writers waiting
    ),
]
