"""A receipt: the record of one request and the proof that it is among those that the month's root was taken over."""

from __future__ import annotations

import asyncio

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import Conflict, NotFound
from ledger.invoices import live_invoice
from ledger.merkle import leaf_hash, prove_inclusion_of
from ledger.month_figures import records_of
from ledger.schema import invoices, usage


class Receipt(msgspec.Struct, frozen=True):
    """All in hex. `scripts/check_receipt.py` recomputes `root` from `record`, `index`, `size` and `path` alone."""

    request_id: str
    record: str
    index: int
    size: int
    path: list[str]
    root: str
    invoice_number: str | None
    """None while the month is not finalized: the root still grows."""


async def receipt_of(c: AsyncConnection, request_id: str) -> Receipt:
    """Raises NotFound, and Conflict when a finalized month no longer gives the root that its invoice carries."""
    billed_in = func.coalesce(usage.c.billed_in, usage.c.period).label("period")
    query = select(usage.c.team_id, billed_in).where(usage.c.request_id == request_id)
    row = (await c.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"no posted request {request_id}")
    wanted = select(usage.c.record).where(usage.c.request_id == request_id)
    record = bytes((await c.execute(wanted)).scalar_one())
    leaves = [leaf_hash(leaf) async for leaf in records_of(c, row.team_id, row.period)]
    at = leaves.index(leaf_hash(record))
    proof, root = await asyncio.to_thread(prove_inclusion_of, leaves, at)  # seconds for millions: others are served too
    invoiced = select(invoices.c.number, invoices.c.merkle_root).where(live_invoice(row.team_id, row.period))
    invoice = (await c.execute(invoiced)).one_or_none()
    if invoice is not None and invoice.merkle_root != root.hex():
        raise Conflict(f"the records of {row.period} are not those that invoice {invoice.number} was made from")
    return Receipt(
        request_id=request_id,
        record=record.hex(),
        index=proof.index,
        size=proof.size,
        path=[sibling.hex() for sibling in proof.path],
        root=root.hex(),
        invoice_number=None if invoice is None else invoice.number,
    )
