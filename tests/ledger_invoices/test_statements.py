from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ledger.merkle import MerkleTree, leaf_hash, prove_inclusion_of, verify_inclusion
from ledger.money import PICO_PER_CENT, FxRate, format_amount, parse_amount, parse_price
from ledger.statements import Line, Party, Statement, TokenTotals, build_statement, split_tax

PRICE = parse_price("0.42")
CNY_PRICE, _ = FxRate.parse("USD", "CNY", "7.3").convert(PRICE)


def usage_line(tokens: int) -> Line:
    return Line(
        kind="usage",
        model="deepseek-v3.2",
        meter="output_text",
        price_version="pv_1",
        tokens=tokens,
        usd_pico_per_token=PRICE,
        cny_pico_per_token=CNY_PRICE,
        usd_pico=tokens * PRICE,
        cny_pico=tokens * CNY_PRICE,
    )


def statement(lines: list[Line], *, carry_in_pico: int = 0, currency: str = "USD", tax_rate_bp: int = 0) -> Statement:
    return build_statement(
        period="2026-11",
        timezone="Asia/Shanghai",
        period_start_ms=1793462400000,
        period_end_ms=1796054400000,
        currency=currency,
        party=Party(team_id="team_1", name="Acme", invoice_title=None, tax_id=None, tax_rate_bp=tax_rate_bp),
        lines=lines,
        topups=[],
        fx=[],
        tokens=TokenTotals(),
        opening_pico=0,
        carry_in_pico=carry_in_pico,
    )


def test_the_reference_month_costs_5_376_usd_and_39_2448_cny_exactly() -> None:
    month = statement([usage_line(12_800_000)])
    assert format_amount(month.exact_usd_pico) == "5.376"
    assert format_amount(month.exact_cny_pico) == "39.2448"
    assert format_amount(month.billed_pico) == "5.37"
    assert format_amount(month.carry_out_pico) == "0.006"


@given(st.lists(st.lists(st.integers(0, 10**9), max_size=6), min_size=1, max_size=24), st.sampled_from(["USD", "CNY"]))
def test_what_is_billed_never_exceeds_nor_lags_a_cent_behind_the_exact_sum(
    months: list[list[int]], currency: str
) -> None:
    carry = exact = billed = 0
    for month in months:
        result = statement([usage_line(tokens) for tokens in month], carry_in_pico=carry, currency=currency)
        assert result.carry_in_pico + result.exact_pico == result.billed_pico + result.carry_out_pico
        assert sum(line.billed_pico for line in result.lines) == result.billed_pico
        assert all(line.billed_pico % PICO_PER_CENT == 0 for line in result.lines)
        carry, exact, billed = result.carry_out_pico, exact + result.exact_pico, billed + result.billed_pico
        assert billed <= exact < billed + PICO_PER_CENT


@given(st.lists(st.integers(-(10**6), 10**9), min_size=1, max_size=8))
def test_waived_lines_are_negative_and_the_statement_still_foots(amounts: list[int]) -> None:
    lines = [
        Line(kind="waived" if pico < 0 else "usage", meter="output_text", usd_pico=pico, cny_pico=pico)
        for pico in amounts
    ]
    if sum(amounts) < 0:
        return
    result = statement(lines)
    assert sum(line.billed_pico for line in result.lines) == result.billed_pico


def test_200_000_small_calls_are_billed_to_the_cent_and_not_to_zero() -> None:
    month = statement([usage_line(1_798) for _ in range(200_000)])
    assert month.exact_pico == 200_000 * 1_798 * PRICE
    assert format_amount(month.billed_pico) == "151.03"


def test_net_and_tax_add_up_to_the_gross_with_net_rounded_half_up() -> None:
    assert split_tax(parse_amount("100"), 600) == (parse_amount("94.34"), parse_amount("5.66"))
    assert split_tax(parse_amount("0.01"), 10_000) == (parse_amount("0.01"), 0)
    assert split_tax(parse_amount("7.3"), 0) == (parse_amount("7.3"), 0)


@given(st.integers(0, 70), st.data())
def test_every_record_proves_its_place_under_the_root_and_a_forged_one_does_not(size: int, data: st.DataObject) -> None:
    records = [str(n).encode() for n in range(size)]
    tree = MerkleTree()
    for record in records:
        tree.add(record)
    if not size:
        return
    index = data.draw(st.integers(0, size - 1))
    proof, root = prove_inclusion_of([leaf_hash(record) for record in records], index)
    assert root == tree.root()
    assert verify_inclusion(records[index], proof, root)
    assert not verify_inclusion(records[index] + b"!", proof, root)
