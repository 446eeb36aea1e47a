"""PDF for the file and the customer: one A4 document, Chinese and English, the same bytes whenever it is written."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import Any
from xml.sax.saxutils import escape

from reportlab.lib.colors import HexColor
from reportlab.lib.pagesizes import A4
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfbase.pdfmetrics import getRegisteredFontNames, registerFont
from reportlab.pdfbase.ttfonts import TTFont
from reportlab.platypus import Paragraph, SimpleDocTemplate, Spacer, Table

from ledger.documents.wording import (
    account_lines,
    closing_notes,
    describe,
    heading,
    number_or_state,
    summary,
    title,
    unit_price,
)
from ledger.money import format_amount
from ledger.statements import Statement

_FONT = "WenQuanYi Micro Hei"
_TEXT = ParagraphStyle("text", fontName=_FONT, fontSize=8, leading=11, wordWrap="CJK")
_TITLE = ParagraphStyle("title", parent=_TEXT, fontSize=15, leading=20)
_NUMBER = ParagraphStyle("number", parent=_TEXT, alignment=2)
_RULE = ("LINEBELOW", (0, 0), (-1, 0), 0.6, HexColor("#333333"))
_MARGIN = 18 * mm
_WIDTH = A4[0] - 2 * _MARGIN - 12  # the frame pads six points on either side


def write_pdf(statement: Statement) -> bytes:
    """All figures are those of the other formats; nothing in it depends on when or where it was written."""
    if _FONT not in getRegisteredFontNames():
        font = files("paperang_p2_fonts_cjk") / "fonts" / "wqy-microhei.ttc"
        registerFont(TTFont(_FONT, str(font), subfontIndex=0))
    name = f"{title(statement)} {number_or_state(statement)}"
    buffer = io.BytesIO()
    document = SimpleDocTemplate(
        buffer,
        pagesize=A4,
        leftMargin=_MARGIN,
        rightMargin=_MARGIN,
        topMargin=_MARGIN,
        bottomMargin=_MARGIN,
        title=name,
        author="TallyGate",
        invariant=1,
    )
    story = [Paragraph(escape(name), _TITLE), Spacer(0, 3 * mm), _pairs(heading(statement)), Spacer(0, 4 * mm)]
    story += [_lines(statement), Spacer(0, 4 * mm)]
    if statement.topups or statement.movements:
        story += [_account_lines(statement), Spacer(0, 4 * mm)]
    figures = [(f"{name} {chinese}", f"{amount} {statement.currency}") for name, chinese, amount in summary(statement)]
    story.append(_pairs(figures + [(f"{name} {chinese}", text) for name, chinese, text in closing_notes(statement)]))
    footer = f"{name} · {statement.party.team_id}"
    document.build(story, onFirstPage=_footer(footer), onLaterPages=_footer(footer))
    return buffer.getvalue()


def _lines(statement: Statement) -> Table:
    titles = ("Description 项目", "Tokens 数量", "USD / 1M", "CNY / 1M", "Exact 精确金额", "Billed 计费金额")
    rows = [_row(titles)]
    for line in statement.lines:
        exact = line.usd_pico if statement.currency == "USD" else line.cny_pico
        tokens = f"{line.tokens:,}" if line.tokens else ""
        prices = (unit_price(line, "USD"), unit_price(line, "CNY"))
        rows.append(_row((describe(line), tokens, *prices, format_amount(exact), format_amount(line.billed_pico))))
    sums = (format_amount(statement.exact_pico), format_amount(statement.billed_pico))
    rows.append(_row((f"Total ({statement.currency})", "", "", "", *sums)))
    table = Table(rows, colWidths=[_WIDTH * share for share in (0.33, 0.13, 0.11, 0.11, 0.18, 0.14)], repeatRows=1)
    table.setStyle(
        [_RULE, ("LINEABOVE", (0, -1), (-1, -1), 0.6, HexColor("#333333")), ("VALIGN", (0, 0), (-1, -1), "TOP")]
    )
    return table


def _account_lines(statement: Statement) -> Table:
    rows = [[_text("Balance 余额变动"), _text("Reference 参考号"), _text(statement.currency, _NUMBER)]]
    for date, what, reference, amount in account_lines(statement):
        rows.append([*map(_text, (f"{date} {what}", reference)), _text(amount, _NUMBER)])
    table = Table(rows, colWidths=[_WIDTH * share for share in (0.4, 0.4, 0.2)], repeatRows=1)
    table.setStyle([_RULE])
    return table


def _pairs(rows: list[tuple[str, str]]) -> Table:
    cells = [[_text(name), _text(value)] for name, value in rows]
    table = Table(cells, colWidths=[_WIDTH * 0.3, _WIDTH * 0.7], hAlign="LEFT")
    table.setStyle([("VALIGN", (0, 0), (-1, -1), "TOP"), ("BOTTOMPADDING", (0, 0), (-1, -1), 1)])
    return table


def _row(cells: tuple[str, ...]) -> list[Paragraph]:
    first, *numbers = cells
    return [_text(first), *(_text(number, _NUMBER) for number in numbers)]


def _text(value: str, style: ParagraphStyle = _TEXT) -> Paragraph:
    return Paragraph(escape(value), style)


def _footer(text: str) -> Any:
    def draw(canvas: Any, document: Any) -> None:
        canvas.setFont(_FONT, 7)
        canvas.drawString(_MARGIN, 10 * mm, text)
        canvas.drawRightString(A4[0] - _MARGIN, 10 * mm, str(document.page))

    return draw
