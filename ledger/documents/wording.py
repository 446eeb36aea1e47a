"""What the lines and the figures are called, in English and in Chinese (the words of a 对账单)."""

from __future__ import annotations

from datetime import datetime
from fractions import Fraction

from ledger.money import PICO_PER_CENT, format_amount, format_price
from ledger.periods import zone
from ledger.statements import FxLine, Line, Movement, MovementKind, Statement, TopupLine

METER_NAMES = {
    "input_uncached": "input",
    "cache_read": "input, cache read",
    "cache_write": "input, cache write",
    "output_text": "output",
    "output_reasoning": "output, reasoning",
}

MOVEMENT_NAMES: dict[MovementKind, tuple[str, str]] = {
    "grant": ("Promo credit given", "赠金"),
    "expiry": ("Promo credit expired", "赠金过期"),
    "payment": ("Invoices paid", "账单回款"),
    "credit_note": ("Credit notes", "贷项"),
    "correction": ("Balance corrected", "余额更正"),
}

_DIGITS = "零壹贰叁肆伍陆柒捌玖"
_PLACES = ("", "拾", "佰", "仟")
_GROUPS = ("", "万", "亿")


def describe(line: Line) -> str:
    late = f", late usage of {line.late_of}" if line.late_of else ""
    match line.kind:
        case "usage":
            return f"{line.model} {METER_NAMES[line.meter]} tokens{late}"
        case "waived":
            return f"{line.model} used and not billed{late}"
        case "promo":
            return "Paid with promo credit"
        case "carry_in":
            return "Fraction carried in from the month before"
        case "credit":
            return f"Credit: {line.note}"


def summary(statement: Statement) -> list[tuple[str, str, str]]:
    """(name, 中文名, amount): the figures below the lines, in the order of a 对账单."""
    if statement.kind == "credit_note":
        rows = _totals(statement)
    else:
        moved = ((*MOVEMENT_NAMES[kind], statement.moved_pico(kind)) for kind in MOVEMENT_NAMES)
        drawn = (
            ("of it paid with promo credit", "赠金抵扣", statement.promo_pico),
            ("of it drawn on credit", "信用支付", statement.on_credit_pico),
        )
        rows = [
            ("Opening balance", "期初余额", statement.opening_pico),
            ("Top-ups", "充值", statement.topups_pico),
            *(row for row in moved if row[2]),
            ("Consumption, exact (tax included)", "消费(含税)", statement.consumption_pico),
            *(row for row in drawn if row[2]),
            ("Closing balance", "期末余额", statement.closing_pico),
            ("Fraction carried in", "上期抹零结转", statement.carry_in_pico),
            ("Fraction carried out", "抹零", statement.carry_out_pico),
            *_totals(statement),
            ("Due", "应付金额", statement.due_pico),
        ]
    return [(name, chinese, format_amount(pico)) for name, chinese, pico in rows]


def _totals(statement: Statement) -> list[tuple[str, str, int]]:
    return [
        ("Net amount", "不含税金额", statement.net_pico),
        ("Tax", "税额", statement.tax_pico),
        ("Total billed", "价税合计", statement.billed_pico),
    ]


def title(statement: Statement) -> str:
    """What kind of document it is, in both languages."""
    return "Credit note 贷项通知单" if statement.kind == "credit_note" else "Statement 对账单"


def account_lines(statement: Statement) -> list[tuple[str, str, str, str]]:
    """(date, what in both languages, reference, amount) of all that moved the balance beside consumption, by time."""
    moved: list[tuple[int, str, TopupLine | Movement]] = [
        (line.at_ms, "Refund 退款" if line.amount_pico < 0 else f"Top-up 充值 {line.provider}", line)
        for line in statement.topups
    ]
    moved += [(line.at_ms, " ".join(MOVEMENT_NAMES[line.kind]), line) for line in statement.movements]
    return [
        (local_date(at_ms, statement.timezone), what, line.reference, format_amount(line.amount_pico))
        for at_ms, what, line in sorted(moved, key=lambda item: item[0])
    ]


def heading(statement: Statement) -> list[tuple[str, str]]:
    """(name in both languages, value): whose statement of which month this is."""
    party, zone_name = statement.party, statement.timezone
    first, last = statement.period_start_ms, statement.period_end_ms - 1
    rows = [
        ("Issued 开具日期", issued(statement)),
        ("For invoice 对应账单", statement.refers_to),
        ("Period 账期", f"{local_date(first, zone_name)} – {local_date(last, zone_name)} ({zone_name})"),
        ("Team 客户", party.name),
        ("Invoice title 发票抬头", party.invoice_title),
        ("Tax number 纳税人识别号", party.tax_id),
    ]
    return [(name, value) for name, value in rows if value]


def number_or_state(statement: Statement) -> str:
    """Its number; of what has none yet, what it is."""
    return statement.number or f"{statement.state} (not a tax document)"


def issued(statement: Statement) -> str | None:
    """The date on which it was finalized, in the team's zone."""
    return None if statement.issued_ms is None else local_date(statement.issued_ms, statement.timezone)


def closing_notes(statement: Statement) -> list[tuple[str, str, str]]:
    """(name, 中文名, text): what stands below the figures."""
    rows = []
    if statement.currency == "CNY":
        rows.append(("Total billed in words", "价税合计(大写)", capital_amount(statement.billed_pico)))
    rows.append(("Tax rate", "税率", tax_rate(statement)))
    rows += [("Exchange rate", "汇率与生效日", exchange_rate(fx, statement.timezone)) for fx in statement.fx]
    if statement.merkle_root:
        rows.append(("Merkle root", "默克尔根", statement.merkle_root))
    return rows


def capital_amount(pico: int) -> str:
    """Whole fen in the capitals that Chinese documents require: 39.24 is 人民币叁拾玖元贰角肆分.

    Source: 支付结算办法, 附一 正确填写票据和结算凭证的基本规定.
    Raises ValueError for a fraction of a fen or 10^12 yuan.
    """
    fen, fraction = divmod(abs(pico), PICO_PER_CENT)
    yuan, rest = divmod(fen, 100)
    if fraction or yuan >= 10**12:
        raise ValueError(f"{pico} pico is not a number of fen below 10^12 yuan")
    jiao, last = divmod(rest, 10)
    text = _capital_integer(yuan) + "元" if yuan else ""
    if not rest:
        return f"人民币{'负' if pico < 0 else ''}{text or '零元'}整"
    if jiao:
        text += _DIGITS[jiao] + "角"
    elif yuan:
        text += "零"
    text += _DIGITS[last] + "分" if last else "整"
    return f"人民币{'负' if pico < 0 else ''}{text}"


def _capital_integer(number: int) -> str:
    text, zero = "", False
    for position in range(11, -1, -1):
        digit = number // 10**position % 10
        if digit:
            text += ("零" if zero and text else "") + _DIGITS[digit] + _PLACES[position % 4]
            zero = False
        else:
            zero = True
        if position % 4 == 0 and position and number // 10**position % 10**4:
            text += _GROUPS[position // 4]
    return text


def exchange_rate(fx: FxLine, timezone: str) -> str:
    """ "1 USD = 7.3 CNY since 2026-11-01 (pv_1)": a decimal where it is finite, else the exact ratio."""
    return (
        f"1 {fx.base} = {_ratio(fx)} {fx.quote} since {local_date(fx.effective_from_ms, timezone)} ({fx.price_version})"
    )


def local_date(at_ms: int, timezone: str) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone(timezone)).strftime("%Y-%m-%d")


def local_time(at_ms: int, timezone: str) -> str:
    return datetime.fromtimestamp(at_ms / 1000, zone(timezone)).isoformat(timespec="seconds")


def unit_price(line: Line, currency: str) -> str:
    """Per 1M tokens; empty where a line has none."""
    if line.kind != "usage":
        return ""
    return format_price(line.usd_pico_per_token if currency == "USD" else line.cny_pico_per_token)


def tax_rate(statement: Statement) -> str:
    return f"{format_amount(statement.party.tax_rate_bp * 10**10)} %"


def _ratio(fx: FxLine) -> str:
    scaled = Fraction(fx.numerator, fx.denominator) * 10**12
    return format_amount(int(scaled)) if scaled.denominator == 1 else f"{fx.numerator}/{fx.denominator}"
