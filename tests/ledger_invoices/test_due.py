"""What an invoice leaves to be paid, who pays it, and what takes it back: promo credit, credit line, credit notes."""

from __future__ import annotations

import csv
import io
import json

import pytest
from msgspec.structs import asdict
from sqlalchemy import select, update

from ledger import invoices
from ledger.accounts import balance
from ledger.audit import By, record
from ledger.credit_notes import credit_invoice
from ledger.documents import format_named
from ledger.errors import Conflict, Invalid
from ledger.invoices import Invoice
from ledger.money import parse_amount
from ledger.periods import next_period, period_bounds
from ledger.schema import invoices as table
from ledger.teams import TeamChange, update_team
from ledger.topups import expire_grants, grant, refund
from ledger.verify import verify
from tests.ledger_flow.material import USD, House, now_ms, run, used
from tests.ledger_invoices.material import LAST_MONTH, THIS_MONTH, ZONE, draft, finalized, foots, in_month, proven

CENT = USD // 100
UNIT = 25_000 * 420_000
"""1.05 cents."""
START_MS, END_MS = period_bounds(LAST_MONTH, ZONE)


def by(at_ms: int | None = None) -> By:
    return By("finance", at_ms or now_ms())


async def give(house: House, cents: int, *, at_ms: int, expires_at_ms: int, reference: str = "welcome") -> None:
    async with house.db.begin() as c:
        terms = {"currency": house.currency, "reference": reference, "expires_at_ms": expires_at_ms}
        await grant(c, by(at_ms), house.team_id, cents * CENT, **terms)


async def limit(house: House, amount: str) -> None:
    async with house.db.begin() as c:
        await update_team(c, by(), house.team_id, TeamChange(credit_limit_pico=parse_amount(amount)))


async def without_balance(house: House) -> None:
    async with house.db.begin() as c:
        await refund(c, by(START_MS + 1), house.team_id, 10 * USD, currency="USD", reference="all of it")


async def spend(house: House, units: int, period: str = LAST_MONTH) -> None:
    """UNIT each."""
    gate = house.gates[0] if house.gates else await house.gate()
    await gate.refresh()
    await run(gate, in_month(house, period, prompt=0, output=25_000 * units), used(0, 25_000 * units))
    await house.post()


async def closed(house: House, period: str = LAST_MONTH) -> Invoice:
    assert (await house.close_month(period)).state == "closed"
    return await finalized(house, period)


async def mark(house: House, invoice: Invoice, state: str) -> Invoice:
    async with house.db.begin() as c:
        return await invoices.mark(c, invoice.id, state, by())


async def credit(house: House, invoice: Invoice, cents: int, reference: str = "c1") -> Invoice:
    async with house.db.begin() as c:
        terms = {"reference": reference, "reason": "outage"}
        return await credit_invoice(c, by(), invoice.id, cents * CENT, **terms)


async def used_and_free(house: House) -> tuple[int, int]:
    """(used of the credit limit, limit), pico."""
    async with house.db.read() as c:
        found = await balance(c, house.team_id, now_ms())
    return found.credit_used_pico, found.credit_limit_pico


async def test_promo_credit_its_use_and_its_end_have_lines_of_their_own_and_are_not_billed(sqlite_house: House) -> None:
    await give(sqlite_house, 5, at_ms=START_MS + 1, expires_at_ms=END_MS - 1)
    await spend(sqlite_house, 2)
    await sqlite_house.gates.pop().close()
    await sqlite_house.post()
    async with sqlite_house.db.begin() as c:
        await expire_grants(c, by(END_MS - 1))
    month = await draft(sqlite_house, LAST_MONTH)
    assert foots(month)
    assert [(line.kind, line.amount_pico) for line in month.movements] == [
        ("grant", 5 * CENT),
        ("expiry", 2 * UNIT - 5 * CENT),
    ]
    assert (month.consumption_pico, month.promo_pico, month.billed_pico, month.due_pico) == (2 * UNIT, 2 * UNIT, 0, 0)
    assert [(line.kind, line.usd_pico) for line in month.lines] == [("usage", 2 * UNIT), ("promo", -2 * UNIT)]
    assert month.closing_pico == 10 * USD
    for name in ("csv", "json", "xlsx", "pdf", "focus"):
        assert format_named(name).write(month)
    rows = list(csv.reader(io.StringIO(format_named("csv").write(month).decode("utf-8-sig"))))
    assert [row[1] for row in rows if row and row[-1] == "USD" and row[1].startswith("Promo")] == [
        "Promo credit given 赠金",
        "Promo credit expired 赠金过期",
    ]
    await proven(sqlite_house)


async def test_what_promo_credit_did_not_cover_is_billed_and_the_closing_balance_is_what_the_accounts_hold(
    house: House,
) -> None:
    await give(house, 1, at_ms=START_MS + 1, expires_at_ms=END_MS + 10**10)
    await spend(house, 3)
    month = await draft(house, LAST_MONTH)
    assert foots(month)
    assert (month.promo_pico, month.exact_pico, month.billed_pico) == (CENT, 3 * UNIT - CENT, 2 * CENT)
    held = [await house.account(kind) for kind in ("prepaid", "grant")]
    assert month.closing_pico == sum(int(row.credits_pico - row.debits_pico) for row in held)
    invoice = await closed(house)
    assert (invoice.billed_pico, invoice.carry_out_pico, invoice.due_pico) == (2 * CENT, 3 * UNIT - 3 * CENT, 0)
    await proven(house)


async def test_a_paid_invoice_refills_the_credit_line_once(house: House) -> None:
    await without_balance(house)
    await limit(house, "0.05")
    await spend(house, 3)
    invoice = await closed(house)
    assert (invoice.billed_pico, invoice.due_pico) == (3 * CENT, 3 * CENT)
    assert await used_and_free(house) == (3 * UNIT, 5 * CENT)
    for _ in range(2):
        assert (await mark(house, invoice, "paid")).state == "paid"
        assert await used_and_free(house) == (3 * UNIT - 3 * CENT, 5 * CENT)
    await limit(house, "0.04")
    assert await used_and_free(house) == (3 * UNIT - 3 * CENT, 4 * CENT)
    await spend(house, 3, THIS_MONTH)
    month = await draft(house)
    assert foots(month)
    assert [(line.kind, line.amount_pico, line.reference) for line in month.movements] == [
        ("payment", 3 * CENT, invoice.number)
    ]
    assert month.closing_pico == -(6 * UNIT - 3 * CENT)
    await proven(house)


async def test_an_invoice_that_was_paid_before_the_upgrade_refills_the_credit_line_when_it_is_paid_again(
    house: House,
) -> None:
    """The version that marked it as paid booked nothing, and its act knows of nothing that was due."""
    await without_balance(house)
    await limit(house, "0.05")
    await spend(house, 3)
    invoice = await closed(house)
    act = {name: value for name, value in asdict(invoice).items() if name != "due_pico"} | {"state": "paid"}
    async with house.db.begin() as c:
        await c.execute(update(table).where(table.c.id == invoice.id).values(state="paid"))
        await record(c, by(), "invoice.paid", "invoice", invoice.id, team_id=house.team_id, after=act)
    assert await used_and_free(house) == (3 * UNIT, 5 * CENT)
    await proven(house)
    for _ in range(2):
        assert (await mark(house, invoice, "paid")).state == "paid"
        assert await used_and_free(house) == (3 * UNIT - 3 * CENT, 5 * CENT)
    month = await draft(house)
    assert foots(month)
    assert [(line.kind, line.amount_pico) for line in month.movements] == [("payment", 3 * CENT)]
    await proven(house)


async def test_only_what_was_drawn_on_credit_is_due_and_fractions_of_it_are_asked_for_later(
    sqlite_house: House,
) -> None:
    await without_balance(sqlite_house)
    await sqlite_house.top_up(UNIT)
    await limit(sqlite_house, "1")
    await spend(sqlite_house, 2)
    first = await closed(sqlite_house)
    assert (first.billed_pico, first.due_pico) == (2 * CENT, CENT)
    await spend(sqlite_house, 19, THIS_MONTH)
    month = await draft(sqlite_house)
    assert foots(month)
    assert month.carry_in_pico + 19 * UNIT == 20 * UNIT + UNIT - 2 * CENT
    assert (month.on_credit_pico, month.due_pico) == (19 * UNIT, 20 * CENT)
    second = await closed(sqlite_house, THIS_MONTH)
    assert first.due_pico + second.due_pico == 20 * UNIT


async def test_a_void_invoice_gives_back_what_it_asked_for(sqlite_house: House) -> None:
    await without_balance(sqlite_house)
    await limit(sqlite_house, "1")
    await spend(sqlite_house, 3)
    first = await closed(sqlite_house)
    before = await used_and_free(sqlite_house)
    await mark(sqlite_house, first, "void")
    assert await used_and_free(sqlite_house) == before
    again = await finalized(sqlite_house)
    assert (again.due_pico, again.carry_out_pico) == (first.due_pico, first.carry_out_pico)
    assert again.number != first.number
    await mark(sqlite_house, again, "void")
    await spend(sqlite_house, 1, THIS_MONTH)
    later = await draft(sqlite_house)
    assert later.due_pico == min(later.billed_pico, 4 * CENT)
    await proven(sqlite_house)


async def test_a_credit_note_takes_off_what_is_due_and_then_goes_to_the_balance(house: House) -> None:
    await without_balance(house)
    await limit(house, "1")
    await spend(house, 4)
    invoice = await closed(house)
    note = await credit(house, invoice, 1)
    assert (note.kind, note.billed_pico, note.due_pico, note.refers_to) == ("credit_note", -CENT, CENT, invoice.id)
    assert note.number is not None
    assert note.number.startswith("TGC-")
    assert await credit(house, invoice, 1) == note
    with pytest.raises(Conflict, match="already stands for"):
        await credit(house, invoice, 2)
    with pytest.raises(Conflict, match="has the credit note"):
        await mark(house, invoice, "void")
    with pytest.raises(Conflict, match="a credit note"):
        await mark(house, note, "paid")
    await mark(house, invoice, "paid")
    assert (await used_and_free(house))[0] == 4 * UNIT - 4 * CENT
    second = await credit(house, invoice, 2, "c2")
    assert (second.due_pico, (await house.account()).credits_pico) == (0, 10 * USD + 2 * CENT)
    with pytest.raises(Conflict, match=r"with 0\.01 USD more"):
        await credit(house, invoice, 2, "c3")
    month = await draft(house)
    assert foots(month)
    assert month.moved_pico("credit_note") == 3 * CENT
    assert month.moved_pico("payment") == 3 * CENT
    await proven(house)


async def test_a_credit_note_is_whole_cents_with_a_reason_and_a_document(sqlite_house: House) -> None:
    await spend(sqlite_house, 4)
    invoice = await closed(sqlite_house)
    async with sqlite_house.db.begin() as c:
        for amount, reference, reason in ((CENT + 1, "r", "x"), (-CENT, "r", "x"), (CENT, " ", "x"), (CENT, "r", "")):
            with pytest.raises(Invalid):
                await credit_invoice(c, by(), invoice.id, amount, reference=reference, reason=reason)
    note = await credit(sqlite_house, invoice, 3)
    async with sqlite_house.db.read() as c:
        document = await invoices.statement_of_invoice(c, note.id)
    for name in ("csv", "xlsx", "pdf", "focus"):
        assert format_named(name).write(document)
    plain = json.loads(format_named("json").write(document))
    assert (plain["kind"], plain["refers_to"], plain["amounts"]["billed"]) == ("credit_note", invoice.number, "-0.03")
    assert plain["lines"][0]["description"] == "Credit: outage"
    await proven(sqlite_house)


async def test_a_month_finalized_again_after_later_ones_does_not_ask_for_what_they_ask_for(house: House) -> None:
    await without_balance(house)
    await limit(house, "1")
    await spend(house, 10)
    first = await closed(house)
    await house.gates.pop().close()
    await house.post()
    await house.top_up(USD)
    await spend(house, 1, THIS_MONTH)
    await closed(house, THIS_MONTH)
    await mark(house, first, "void")
    await spend(house, 20, next_period(THIS_MONTH))
    third = await closed(house, next_period(THIS_MONTH))
    again = await finalized(house)
    assert (first.due_pico, third.due_pico, again.due_pico) == (10 * CENT, 10 * CENT, 0)
    for invoice in (again, third):
        await mark(house, invoice, "paid")
    assert await used_and_free(house) == (10 * UNIT - 10 * CENT, 100 * CENT)
    await proven(house)


async def test_the_proof_fails_when_invoices_ask_for_more_than_was_drawn_on_credit(house: House) -> None:
    await without_balance(house)
    await limit(house, "1")
    await spend(house, 3)
    invoice = await closed(house)
    async with house.db.begin() as c:
        await c.execute(update(table).where(table.c.id == invoice.id).values(due_pico=4 * CENT))
    report = await verify(house.db, house.journal_dir)
    (check,) = [check for check in report.checks if check.name == "invoices"]
    assert check.difference == (
        f"the invoices of team {house.team_id} ask for {4 * CENT} pico, it drew {3 * UNIT} on credit"
    )


async def test_the_proof_holds_for_an_invoice_that_billed_promo_credit_as_earlier_versions_did(house: House) -> None:
    await give(house, 5, at_ms=START_MS + 1, expires_at_ms=END_MS + 10**10)
    await spend(house, 10)
    invoice = await closed(house)
    async with house.db.begin() as c:
        query = select(table.c.document).where(table.c.id == invoice.id)
        document = json.loads((await c.execute(query)).scalar_one())
        for name in ("promo_pico", "on_credit_pico", "due_pico", "movements"):
            del document[name]
        figures = {"exact_pico": 10 * UNIT, "billed_pico": 10 * CENT, "carry_out_pico": 10 * UNIT - 10 * CENT}
        values = {**figures, "document": json.dumps(document | figures).encode()}
        await c.execute(update(table).where(table.c.id == invoice.id).values(values))
    report = await verify(house.db, house.journal_dir)
    assert [check.difference for check in report.checks if check.name == "invoices"] == [None]
