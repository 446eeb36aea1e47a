from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openpyxl import load_workbook
from pypdf import PdfReader
from sqlalchemy import event, text, update

from ledger import invoices
from ledger.audit import By
from ledger.corrections import approve, propose
from ledger.documents import file_name, format_named
from ledger.errors import Conflict, Invalid, NotFound
from ledger.money import format_amount, parse_amount
from ledger.month_figures import draft_statement
from ledger.periods import next_period, period_bounds
from ledger.publishing import Quote, publish_prices
from ledger.receipts import receipt_of
from ledger.schema import invoices as invoice_table
from ledger.statements import Statement
from ledger.teams import TeamChange, update_team
from ledger.topups import refund
from tests.ledger_flow.material import MODEL, House, now_ms, price, run, used
from tests.ledger_invoices.material import CHECK_RECEIPT, LAST_MONTH, THIS_MONTH, ZONE, draft, finalized, proven


def after(period: str) -> By:
    return By("finance", period_bounds(period, ZONE)[1])


async def finalize(house: House, period: str = THIS_MONTH, by: By | None = None) -> invoices.Invoice:
    by = by or after(period)
    if by.at_ms >= period_bounds(period, ZONE)[1]:
        assert (await house.close_month(period, at_ms=by.at_ms)).state == "closed"
    async with house.db.begin() as c:
        return await invoices.finalize(c, house.team_id, period, by)


def check_receipt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(CHECK_RECEIPT), *arguments], capture_output=True, text=True)


async def spend(house: House, prompt: int = 1_000, generated: int = 500) -> str:
    gate = house.gates[0] if house.gates else await house.gate()
    ask = house.ask(prompt=prompt, output=generated)
    await run(gate, ask, used(prompt, generated))
    await house.post()
    return ask.request_id


async def test_the_months_lines_are_the_requests_to_the_pico(house: House) -> None:
    for n in range(1, 4):
        await spend(house, 100 * n, 10 * n)
    month = await draft(house)
    assert month.exact_usd_pico == sum(price(100 * n, 10 * n) for n in range(1, 4))
    assert month.exact_cny_pico * 10 == month.exact_usd_pico * 73
    assert {(line.meter, line.tokens) for line in month.lines} == {("input_uncached", 600), ("output_text", 60)}
    assert (month.tokens.requests, month.tokens.billed_tokens) == (3, 660)
    assert (month.opening_pico, month.topups_pico) == (parse_amount("10"), 0)
    assert month.closing_pico == parse_amount("10") - month.exact_usd_pico


async def test_each_request_is_on_the_invoice_at_the_price_that_it_was_charged(house: House) -> None:
    """A plan's price, also of a model that has no other; and both prices of a month in which the plan changed."""
    by = By("test", now_ms() - 120_000)
    async with house.db.begin() as c:
        await update_team(c, by, house.team_id, TeamChange(plan="gold"))
        gold = [Quote.parse(model, input="0.14", output="0.21", scope="plan:gold") for model in (MODEL, "golden")]
        version = await publish_prices(c, by, gold)
    gate = await house.gate()
    await run(gate, house.ask(model="golden"), used(100, 200))
    await run(gate, house.ask(), used(100, 200))
    month = await draft_after_posting(house)
    cheap = {("golden", 140_000), ("golden", 210_000), (MODEL, 140_000), (MODEL, 210_000)}
    assert {(line.model, line.usd_pico_per_token) for line in month.lines} == cheap
    async with house.db.begin() as c:
        await update_team(c, By("test", now_ms()), house.team_id, TeamChange(plan=None))
    await gate.refresh()
    await run(gate, house.ask(), used(1_000, 2_000, waive="test"))
    await run(gate, house.ask(), used(1_000, 2_000))
    month = await draft_after_posting(house)
    lines = {(line.kind, line.tokens, line.usd_pico_per_token) for line in month.lines if line.model == MODEL}
    assert lines == {
        ("usage", 100, 140_000),
        ("usage", 200, 210_000),
        ("usage", 2_000, 280_000),
        ("usage", 4_000, 420_000),
        ("waived", 3_000, 0),
    }
    assert {line.price_version for line in month.lines} == {version.id}
    assert month.exact_usd_pico == price(1_000, 2_000) + price(100, 200)


async def draft_after_posting(house: House) -> Statement:
    await house.post()
    return await draft(house)


async def test_an_unknown_team_or_month_is_named(house: House) -> None:
    async with house.db.read() as c:
        with pytest.raises(NotFound, match="team_nobody"):
            await draft_statement(c, "team_nobody", THIS_MONTH)
        with pytest.raises(Invalid, match="2026-13"):
            await draft_statement(c, house.team_id, "2026-13")


async def test_a_month_is_finalized_once_and_its_bytes_never_change(house: House) -> None:
    await spend(house)
    with pytest.raises(Invalid, match="not over"):
        await finalize(house, by=By("finance", now_ms()))
    first = await finalize(house)
    assert first.number is not None
    assert await finalize(house) == first
    async with house.db.read() as c:
        frozen = await invoices.statement_of(c, house.team_id, THIS_MONTH)
    assert (frozen.number, frozen.state) == (first.number, "finalized")


async def test_invoice_numbers_have_no_gaps(house: House) -> None:
    await spend(house)
    by = after(THIS_MONTH)
    numbers = [(await finalize(house, period, by)).number for period in (LAST_MONTH, THIS_MONTH)]
    assert [str(number)[-7:] for number in numbers] == ["-000001", "-000002"]


async def test_months_are_finalized_in_order(house: House) -> None:
    start_ms, _ = period_bounds(LAST_MONTH, ZONE)
    gate = await house.gate()
    await run(gate, house.ask(at_ms=start_ms + 1), used())
    await spend(house)
    with pytest.raises(Conflict, match=f"finalize {LAST_MONTH} first"):
        await finalize(house)
    earlier = await finalize(house, LAST_MONTH)
    later = await finalize(house)
    assert later.carry_in_pico == earlier.carry_out_pico


async def test_a_fraction_is_never_carried_into_two_months(house: House) -> None:
    """A voided month may be finalized again, but not beside a later one that took over what came before it."""
    start_ms, end_ms = period_bounds(LAST_MONTH, ZONE)
    gate = await house.gate()
    await run(gate, house.ask(at_ms=start_ms + 1), used())
    await spend(house)
    first = await finalize(house, LAST_MONTH)
    by = By("finance", end_ms)
    async with house.db.begin() as c:
        await invoices.mark(c, first.id, "void", by)
    later = await finalize(house)
    assert later.carry_in_pico == 0
    with pytest.raises(Conflict, match="void it first"):
        await finalize(house, LAST_MONTH)
    async with house.db.begin() as c:
        await invoices.mark(c, later.id, "void", by)
    again = await finalize(house, LAST_MONTH)
    assert (again.exact_usd_pico, again.carry_out_pico) == (first.exact_usd_pico, first.carry_out_pico)
    assert (await finalize(house)).carry_in_pico == again.carry_out_pico


async def test_what_was_paid_back_is_not_in_the_closing_balance(house: House) -> None:
    await spend(house)
    await house.gates.pop().close()
    async with house.db.begin() as c:
        await refund(c, By("finance", now_ms()), house.team_id, parse_amount("4"), currency="USD", reference="back")
    month = await draft(house)
    account = await house.account()
    assert month.topups_pico == -parse_amount("4")
    assert month.closing_pico == account.credits_pico - account.debits_pico
    assert (await draft(house, next_period(THIS_MONTH))).opening_pico == month.closing_pico


async def test_an_altered_invoice_is_not_handed_out(house: House) -> None:
    await spend(house)
    invoice = await finalize(house)
    async with house.db.begin() as c:
        await c.execute(update(invoice_table).values(document=b'{"forged": true}'))
    async with house.db.read() as c:
        with pytest.raises(Conflict, match="altered"):
            await invoices.statement_of_invoice(c, invoice.id)


async def test_a_finalized_invoice_becomes_paid_or_void_and_nothing_else(house: House) -> None:
    await spend(house)
    invoice = await finalize(house)
    async with house.db.begin() as c:
        assert (await invoices.mark(c, invoice.id, "paid", after(THIS_MONTH))).state == "paid"
        assert (await invoices.mark(c, invoice.id, "paid", after(THIS_MONTH))).state == "paid"
        with pytest.raises(Conflict, match="is paid"):
            await invoices.mark(c, invoice.id, "void", after(THIS_MONTH))


async def test_every_format_says_the_same_figures(house: House) -> None:
    await spend(house, 12_345, 6_789)
    await finalize(house)
    async with house.db.read() as c:
        month = await invoices.statement_of(c, house.team_id, THIS_MONTH)
    usd, cny = format_amount(month.exact_usd_pico), format_amount(month.exact_cny_pico)
    plain = json.loads(format_named("json").write(month))
    assert (plain["cost_usd"], plain["cost_cny"], plain["number"]) == (usd, cny, month.number)
    text = format_named("csv").write(month)
    assert text.startswith(b"\xef\xbb\xbf")
    rows = list(csv.reader(io.StringIO(text.decode("utf-8-sig"))))
    total = next(row for row in rows if row and row[0] == "Total")
    assert (total[7], total[8], total[9]) == (usd, cny, format_amount(month.billed_pico))
    sheet = load_workbook(io.BytesIO(format_named("xlsx").write(month))).active
    assert sheet is not None
    cells = {str(cell.value) for row in sheet.iter_rows() for cell in row if cell.value is not None}
    assert {usd, cny, str(month.number)} <= cells
    pdf = " ".join(page.extract_text() for page in PdfReader(io.BytesIO(format_named("pdf").write(month))).pages)
    assert format_amount(month.exact_pico) in pdf
    assert str(month.number) in pdf
    focus = list(csv.DictReader(io.StringIO(format_named("focus").write(month).decode())))
    assert sum(parse_amount(row["EffectiveCost"]) for row in focus) == month.exact_usd_pico
    assert sum(parse_amount(row["BilledCost"]) for row in focus) == month.billed_pico
    assert file_name(month, format_named("csv")) == f"{month.number}.csv"


async def test_a_team_name_cannot_become_a_spreadsheet_formula(house: House) -> None:
    from ledger.schema import teams

    async with house.db.begin() as c:
        await c.execute(update(teams).values(name="=cmd|' /C calc'!A0"))
    rows = csv.reader(io.StringIO(format_named("csv").write(await draft(house)).decode("utf-8-sig")))
    assert not [cell for row in rows for cell in row if cell.startswith("=")]


async def test_a_receipt_is_checked_by_the_stand_alone_script(house: House, tmp_path: Path) -> None:
    ids = [await spend(house, 10 + n, 5) for n in range(5)]
    invoice = await finalize(house)
    async with house.db.read() as c:
        receipt = await receipt_of(c, ids[2])
    assert receipt.root == invoice.merkle_root
    file = tmp_path / "receipt.json"
    answer = {name: getattr(receipt, name) for name in ("request_id", "record", "index", "size", "path", "root")}
    file.write_text(json.dumps({"receipt": answer}))
    root = ("--root", str(invoice.merkle_root))
    good = check_receipt(str(file), *root)
    assert (good.returncode, "included under" in good.stdout) == (0, True)
    file.write_text(json.dumps({"receipt": {**answer, "record": "00" + answer["record"][2:]}}))
    forged = check_receipt(str(file), *root)
    assert (forged.returncode, "NOT included" in forged.stdout) == (1, True)
    file.write_text("[]")
    assert check_receipt(str(file)).returncode == 2


async def test_no_writer_waits_while_the_requests_of_a_month_are_read_for_its_invoice(house: House) -> None:
    await spend(house)
    await house.close_month(THIS_MONTH)
    reading: list[bool] = []

    def note(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM usage" in statement:
            reading.append(bool(connection.get_execution_options().get("read_only")))

    event.listen(house.db.engine.sync_engine, "before_cursor_execute", note)
    invoice = await finalized(house, THIS_MONTH)
    event.remove(house.db.engine.sync_engine, "before_cursor_execute", note)
    assert reading
    assert all(reading)
    again = await draft(house)
    assert (invoice.merkle_root, invoice.exact_usd_pico) == (again.merkle_root, again.exact_usd_pico)
    assert await finalized(house, THIS_MONTH) == invoice
    await proven(house)


async def test_an_invoice_is_not_made_of_what_was_read_before_a_correction(house: House) -> None:
    await spend(house)
    await house.close_month(THIS_MONTH)
    async with house.db.begin() as c:
        await c.execute(text("UPDATE rollups SET cost_usd_pico = cost_usd_pico - 7"))
    async with house.db.snapshot() as c:
        read = await invoices.read_closed(c, house.team_id, THIS_MONTH)
    (found,) = await propose(house.db, house.journal_dir)
    await approve(house.db, house.journal_dir, after(THIS_MONTH), found.id)
    with pytest.raises(Conflict, match="a correction was approved while"):
        async with house.db.begin() as c:
            await invoices.finalize(c, house.team_id, THIS_MONTH, after(THIS_MONTH), read)
    await finalized(house, THIS_MONTH)
    await proven(house)
