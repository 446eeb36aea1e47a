from __future__ import annotations

import io

import msgspec
import pytest
from pypdf import PdfReader

from ledger.documents import format_named
from ledger.documents.wording import capital_amount
from ledger.money import parse_amount
from ledger.statements import FxLine, Party, Statement, TokenTotals, TopupLine, build_statement
from tests.ledger_invoices.test_statements import usage_line

NOVEMBER_MS = 1793462400000


def month(*, name: str = "甲公司 <A&B>", lines: int = 1) -> Statement:
    fx = FxLine(
        base="USD", quote="CNY", numerator=73, denominator=10, effective_from_ms=NOVEMBER_MS, price_version="pv_1"
    )
    return build_statement(
        period="2026-11",
        timezone="Asia/Shanghai",
        period_start_ms=NOVEMBER_MS,
        period_end_ms=1796054400000,
        currency="CNY",
        party=Party(team_id="team_1", name=name, invoice_title="甲公司", tax_id="91310000", tax_rate_bp=600),
        lines=[usage_line(12_800_000)] * lines,
        topups=[TopupLine(at_ms=NOVEMBER_MS, amount_pico=10**14, provider="wechat", reference="4200001234")],
        fx=[fx],
        tokens=TokenTotals(),
        opening_pico=0,
        carry_in_pico=0,
        merkle_root="ab" * 32,
    )


def text_of(document: bytes) -> list[str]:
    return [page.extract_text() for page in PdfReader(io.BytesIO(document)).pages]


def test_a_pdf_says_the_figures_in_chinese_and_english() -> None:
    (text,) = text_of(format_named("pdf").write(month()))
    for said in (
        "对账单",
        "甲公司 <A&B>",
        "91310000",
        "12,800,000",
        "39.2448",
        "期初余额",
        "4200001234",
        "人民币叁拾玖元贰角肆分",
        "1 USD = 7.3 CNY since 2026-11-01 (pv_1)",
        "ab" * 32,
    ):
        assert said in text, said


@pytest.mark.parametrize("kind", ["pdf", "csv"])
def test_a_document_says_when_it_was_issued_or_that_it_is_a_draft_and_has_no_empty_rows(kind: str) -> None:
    draft = month()
    draft = msgspec.structs.replace(draft, party=msgspec.structs.replace(draft.party, invoice_title=None, tax_id=None))
    text = said_by(kind, draft)
    assert "draft (not a tax document)" in text
    assert not any(name in text for name in ("Issued", "Invoice title", "Tax number"))
    issued = msgspec.structs.replace(month(), state="finalized", number="TG-2026-0001", issued_ms=1796054400000)
    text = said_by(kind, issued)
    assert "not a tax document" not in text
    assert all(said in text for said in ("TG-2026-0001", "Issued", "2026-12-01", "Invoice title", "91310000"))


def said_by(kind: str, statement: Statement) -> str:
    document = format_named(kind).write(statement)
    return "\n".join(text_of(document)) if kind == "pdf" else document.decode("utf-8-sig")


def test_a_pdf_has_the_same_bytes_whenever_it_is_written() -> None:
    write = format_named("pdf").write
    assert write(month()) == write(month())


def test_a_long_month_goes_on_over_pages_and_repeats_its_column_titles() -> None:
    pages = text_of(format_named("pdf").write(month(lines=150)))
    assert len(pages) > 2
    assert all("Tokens 数量" in page for page in pages[:-1])


@pytest.mark.parametrize(
    ("yuan", "words"),
    [
        ("0", "人民币零元整"),
        ("0.05", "人民币伍分"),
        ("0.5", "人民币伍角整"),
        ("1", "人民币壹元整"),
        ("39.24", "人民币叁拾玖元贰角肆分"),
        ("1409.5", "人民币壹仟肆佰零玖元伍角整"),
        ("6007.14", "人民币陆仟零柒元壹角肆分"),
        ("16409.02", "人民币壹万陆仟肆佰零玖元零贰分"),
        ("107000", "人民币壹拾万零柒仟元整"),
        ("100010000", "人民币壹亿零壹万元整"),
        ("100000001.2", "人民币壹亿零壹元贰角整"),
        ("-12.3", "人民币负壹拾贰元叁角整"),
    ],
)
def test_a_total_in_words_follows_the_rules_for_chinese_documents(yuan: str, words: str) -> None:
    assert capital_amount(parse_amount(yuan.lstrip("-")) * (-1 if yuan.startswith("-") else 1)) == words


def test_a_fraction_of_a_fen_has_no_words() -> None:
    with pytest.raises(ValueError, match="not a number of fen"):
        capital_amount(1)
