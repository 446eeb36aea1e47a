"""`verify --repair`: what a new entry can mend is proposed, approved, posted once; the rest is only named."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, text

from ledger.audit import By, record
from ledger.corrections import ACTION, Correction, approve, propose
from ledger.documents.wording import account_lines, summary
from ledger.errors import Conflict, NotFound
from ledger.quotas import Scope
from ledger.schema import audit, rollups, transfers, usage
from ledger.verify import verify
from tests.ledger_flow.material import USD, House, now_ms, run, used
from tests.ledger_flow.test_holds import proven
from tests.ledger_invoices.material import LAST_MONTH, THIS_MONTH, draft, finalized, foots, in_month


async def spent(house: House) -> None:
    gate = await house.gate()
    for _ in range(4):
        await run(gate, house.ask())
    await house.gates.pop().close()
    await house.post()


async def damage(house: House, *statements: str) -> None:
    async with house.db.begin() as c:
        for statement in statements:
            await c.execute(text(statement))
    assert not (await verify(house.db, house.journal_dir)).ok


async def approve_all(house: House) -> list[Correction]:
    """As an operator does: look, approve, look again."""
    done: list[Correction] = []
    while found := await propose(house.db, house.journal_dir):
        for correction in found:
            by = By("ops", now_ms(), "as the journal says")
            assert await approve(house.db, house.journal_dir, by, correction.id) == correction
            done.append(correction)
        assert len(done) < 20
    return done


@pytest.mark.parametrize(
    ("statements", "kinds"),
    [
        (["UPDATE transfers SET amount_pico = amount_pico - 5 WHERE kind = 'usage'"], ["transfer"]),
        (["UPDATE transfers SET amount_pico = amount_pico + 5 WHERE kind = 'usage'"], ["transfer"]),
        (["DELETE FROM transfers WHERE kind = 'usage'"], ["transfer"]),
        (["UPDATE rollups SET requests = requests + 1, cost_usd_pico = cost_usd_pico - 7"], ["rollup"]),
        (["DELETE FROM rollups"], ["rollup"]),
        (["UPDATE accounts SET debits_pico = debits_pico - 3 WHERE kind = 'prepaid'"], ["balance"]),
        (["DELETE FROM usage"], ["request"] * 4),
        (
            [
                "DELETE FROM usage WHERE seq = (SELECT min(seq) FROM usage)",
                "UPDATE transfers SET amount_pico = amount_pico * 2 WHERE kind = 'usage'",
                "UPDATE rollups SET billed_tokens = 0",
                "UPDATE accounts SET debits_pico = 0 WHERE kind = 'prepaid'",
            ],
            ["request", "transfer", "rollup", "balance"],
        ),
    ],
)
async def test_what_was_lost_or_altered_is_put_right_by_new_entries_alone(
    either: House, statements: list[str], kinds: list[str]
) -> None:
    await spent(either)
    assert await propose(either.db, either.journal_dir) == []
    debits = (await either.account()).debits_pico
    await damage(either, *statements)
    async with either.db.read() as c:
        before = {table: set(await c.execute(select(table))) for table in (transfers, rollups, usage)}
    assert [correction.kind for correction in await approve_all(either)] == kinds
    async with either.db.read() as c:
        for table, rows in before.items():
            assert rows <= set(await c.execute(select(table))), f"{table.name}: rows were rewritten"
    assert (await either.account()).debits_pico == debits
    await proven(either)


async def test_a_correction_is_posted_once_and_audited_and_the_same_damage_again_is_another(either: House) -> None:
    await spent(either)
    harm = "UPDATE transfers SET amount_pico = amount_pico + 5 WHERE kind = 'usage'"
    await damage(either, harm)
    (first,) = await propose(either.db, either.journal_dir)
    by = By("ops", now_ms(), "it was altered by hand")
    for _ in range(2):
        assert await approve(either.db, either.journal_dir, by, first.id) == first
    async with either.db.read() as c:
        assert (await c.execute(select(func.count()).where(transfers.c.kind == "usage_reversal"))).scalar_one() == 1
        (act,) = await c.execute(select(audit).where(audit.c.action == "correction.approve"))
    assert (act.actor, act.reason, act.subject_id) == ("ops", "it was altered by hand", first.id)
    await damage(either, harm)
    (second,) = await propose(either.db, either.journal_dir)
    assert second.id != first.id
    await approve(either.db, either.journal_dir, by, second.id)
    await proven(either)


async def test_nothing_is_posted_that_is_not_proposed(house: House) -> None:
    await spent(house)
    with pytest.raises(NotFound, match="verify --repair"):
        await approve(house.db, house.journal_dir, By("ops", now_ms()), "fix_made_up")
    await damage(house, "UPDATE usage SET generated_tokens = 0, billed_tokens = prompt_tokens")
    assert await propose(house.db, house.journal_dir) == []  # a row that was altered: no new entry can mend that


async def test_a_correction_that_nobody_approved_is_named(house: House) -> None:
    await spent(house)
    await damage(
        house,
        "INSERT INTO transfers "
        "(id, batch_id, at_ms, kind, source, destination, amount_pico, currency, team_id, period) "
        "SELECT 'x', 'correction:fix_x', at_ms, 'usage_reversal', destination, source, 1, currency, team_id, period "
        "FROM transfers WHERE kind = 'usage'",
        "UPDATE transfers SET amount_pico = amount_pico + 1 WHERE kind = 'usage'",
    )
    report = await verify(house.db, house.journal_dir)
    assert [check.name for check in report.checks if not check.ok] == ["corrections"]


async def test_beside_a_live_server_a_correction_counts_what_is_posted_meanwhile(house: House) -> None:
    await spent(house)
    await damage(house, "UPDATE accounts SET debits_pico = debits_pico - 3 WHERE kind = 'prepaid'")
    (found,) = await propose(house.db, house.journal_dir)
    gate = await house.gate()
    await run(gate, house.ask())
    await house.post()
    await approve(house.db, house.journal_dir, By("ops", now_ms(), "live"), found.id)
    assert (await house.account()).debits_pico == sum(row.cost_usd_pico for row in await house.rows())
    await proven(house)


@pytest.mark.parametrize("off", [-3, 3])
async def test_a_corrected_balance_moves_in_double_entry_and_its_statement_shows_it(either: House, off: int) -> None:
    await either.budget(Scope.of_key(either.key_id), USD)
    await spent(either)
    before = await draft(either)
    debits = (await either.account()).debits_pico
    await damage(either, f"UPDATE accounts SET debits_pico = debits_pico + {off} WHERE kind IN ('prepaid', 'budget')")
    for mended in await approve_all(either):
        async with either.db.read() as c:
            query = select(transfers).where(transfers.c.batch_id == f"correction:{mended.id}").order_by(transfers.c.id)
            found, put_right = (await c.execute(query)).all()
        account = mended.entry["account"]
        assert (put_right.source if off < 0 else put_right.destination) == account
        assert (found.destination if off < 0 else found.source) == account
        assert {found.amount_pico, put_right.amount_pico} == {3}
    month = await draft(either)
    assert foots(month)
    assert [(line.kind, line.amount_pico) for line in month.movements] == [("correction", -off), ("correction", off)]
    assert month.closing_pico == before.closing_pico == 10 * USD - debits
    assert [name for name, _, _ in summary(month)] == [name for name, _, _ in summary(before)]
    assert [what for _, what, _, _ in account_lines(month)].count("Balance corrected 余额更正") == 2
    await proven(either)
    for kind in ("correction", "correction_reversal"):  # one of the two alone, then both
        await damage(either, f"DELETE FROM transfers WHERE kind = '{kind}'")


async def test_a_balance_that_an_earlier_version_corrected_without_transfers_is_proven(house: House) -> None:
    await spent(house)
    entry = {"account": (await house.account()).id, "debits": 3, "leased": 0}
    async with house.db.begin() as c:
        old = Correction("fix_old", "balance", "off by 3", entry)
        await record(c, By("ops", now_ms()), ACTION, "correction", old.id, after=old)
    await proven(house)


async def late_beside_timely(house: House) -> None:
    """Two requests of one hour, the second posted after the close of their month, which is finalized."""
    gate = await house.gate()
    await run(gate, in_month(house))
    await house.post()
    held = await gate.hold(in_month(house))
    by = By("finance", now_ms())
    for _ in range(2):
        month = await house.try_to_close(LAST_MONTH, house.timezone, by, leave_out=[gate.leases.slot_id])
    assert month.state == "closed"
    await finalized(house)
    await held.settle(used())
    await house.post()
    await proven(house)


async def test_a_lost_late_request_goes_back_to_the_month_that_billed_it(either: House) -> None:
    await late_beside_timely(either)
    before = await either.rows()
    assert {row.billed_in for row in before} == {None, THIS_MONTH}
    await damage(either, "DELETE FROM usage WHERE billed_in IS NOT NULL")
    (mended,) = await approve_all(either)
    assert mended.words.endswith(f"{THIS_MONTH} bills it")
    assert await either.rows() == before
    await damage(either, "DELETE FROM usage WHERE billed_in IS NULL")
    await approve_all(either)
    assert await either.rows() == before
    await proven(either)


async def test_a_lost_request_whose_month_nothing_tells_is_not_proposed(either: House) -> None:
    await late_beside_timely(either)
    await damage(
        either,
        f"DELETE FROM transfers WHERE period = '{THIS_MONTH}' AND batch_id IS NOT NULL",
        "DELETE FROM usage WHERE billed_in IS NOT NULL",
    )
    with pytest.raises(Conflict, match="neither transfers nor rollups say which month billed it: restore a backup"):
        await propose(either.db, either.journal_dir)


async def test_a_balance_that_was_overspent_is_put_right_once_the_team_has_paid_for_it(either: House) -> None:
    """The debits were lost, so what they stood for could be spent again."""
    for again in (True, False):
        gate = await either.gate()
        await run(gate, either.ask(prompt=0, output=14_000_000), used(0, 14_000_000))
        await either.gates.pop().close()
        await either.post()
        if again:
            await damage(either, "UPDATE accounts SET debits_pico = 0 WHERE kind = 'prepaid'")
    (found,) = await propose(either.db, either.journal_dir)
    by = By("ops", now_ms(), "as the journal says")
    with pytest.raises(Conflict, match=r"1\.76 USD more than it ever held.*top up the team by that first"):
        await approve(either.db, either.journal_dir, by, found.id)
    await either.top_up(USD * 176 // 100)
    assert await approve(either.db, either.journal_dir, by, found.id) == found
    await proven(either)
