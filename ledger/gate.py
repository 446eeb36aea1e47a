"""The one gate that every request's money passes: hold → (extend, progress) → settle or void.

A warm hold does no SQL: it looks a plan up, takes an amount out of slices that the slot has leased, and writes INTENT
to the journal. What has to wait for SQL (a first plan, more money, an Idempotency-Key) is told apart below as such.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError

from ledger.audit import changes_since, latest_seq
from ledger.billing import affordable_output, next_window
from ledger.claims import DoubtfulClaims, claim
from ledger.database import Database
from ledger.errors import InsufficientQuota, Invalid, LedgerError, LedgerUnavailable
from ledger.hold import Hold
from ledger.journal import Files, JournalWriter, SlotLock, host_id
from ledger.journal.closing import Override
from ledger.journal.opening import close_epochs
from ledger.journal.segments import SEGMENT_BYTES
from ledger.leases import DRY_FOR_MS, RETRY_AFTER_MS, Fenced, Leases
from ledger.months import months_to_seal
from ledger.periods import still_ahead
from ledger.plan_cache import PlanCache
from ledger.plans import Part, Plan
from ledger.prices import PriceBook
from ledger.records import EpochClosed, Intent, Void
from ledger.recovery import begin_epoch, look_behind, recover
from ledger.reductions import Reductions
from ledger.requests import Ask, Outcome, Receipt, Spender, Tokens
from ledger.schema import epochs, slots
from ledger.sealing import BillingMonths
from ledger.slices import Slice

__all__ = ["Ask", "Gate", "Hold", "Outcome", "Receipt", "Spender", "Tokens"]

log = structlog.get_logger(__name__)

PROGRESS_S = 0.8
"""How often the progress of all open streams is journalled, whatever their speed."""
HEARTBEAT_MS = 2_000
IDLE_MS = 30_000
"""A slice that nobody drew on for so long goes back to its account."""
SWEEP_MS = 1_000
MAX_ROUNDS = 8


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Gate:
    """One worker slot's gate. Open it with `Gate.open`; call `refresh` each 250 ms; end with `close`."""

    def __init__(
        self, db: Database, journal: JournalWriter, leases: Leases, book: PriceBook, seen: int, clock: Callable[[], int]
    ) -> None:
        self.db = db
        self.journal = journal
        self.leases = leases
        self.clock = clock
        self.moving: set[Hold] = set()
        """Streams whose latest progress is not journalled yet."""
        self.lost_epochs: dict[str, str] = {}
        """Why the leases of older epochs of this slot stay locked, by "slot:epoch"."""
        self._seen = seen
        self.months = BillingMonths()
        self._plans = PlanCache(db, leases, self.months, book)
        self._reductions = Reductions(leases)
        self._doubtful_claims = DoubtfulClaims(leases.slot_id, leases.epoch, clock)
        self._open_holds = 0
        self._entering = 0  # requests that wait for SQL before their INTENT: what they take there outlives them
        self._all_ended = asyncio.Event()
        self._closed = False
        self._failure: str | None = None
        self._next_heartbeat_ms = 0
        self._next_sweep_ms = 0
        self._ticker: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        db: Database,
        journal_dir: Path,
        slot: int,
        *,
        clock: Callable[[], int] = now_ms,
        segment_bytes: int = SEGMENT_BYTES,
        accept_damage: str | None = None,
        files: Files | None = None,
    ) -> Gate:
        """Takes the slot, begins a new epoch and recovers what older ones left behind.

        Raises LedgerUnavailable (the slot is taken, SQL or disk does not answer), JournalDamaged.
        """
        slot_id = f"{await asyncio.to_thread(host_id, journal_dir)}/{slot}"
        slot_dir = journal_dir / str(slot)
        lock = await asyncio.to_thread(SlotLock.acquire, slot_dir)
        try:
            await asyncio.to_thread(_require_room, files or Files(), slot_dir, segment_bytes)
            given_up = await asyncio.to_thread(_end_older, files or Files(), slot_dir, clock(), accept_damage)
            behind = await look_behind(db, slot_id, slot_dir)
            epoch, journal_uuid = await begin_epoch(db, slot_id, slot_dir, clock())
        except BaseException:
            lock.release()
            raise
        journal = await asyncio.to_thread(
            JournalWriter.open,
            slot_dir,
            epoch=epoch,
            journal_uuid=journal_uuid,
            lock=lock,
            segment_bytes=segment_bytes,
            files=files,
            clock=clock,
        )
        journal.overrides += given_up
        try:
            lost = await recover(db, journal, slot_id, behind, clock())
            async with db.read() as c:
                seen = await latest_seq(c)
                book = await PriceBook.load(c, clock())
                asked = await months_to_seal(c)
        except BaseException:
            await journal.close()
            raise
        gate = cls(db, journal, Leases(db, slot_id, epoch, journal_uuid, clock), book, seen, clock)
        gate.lost_epochs = lost
        gate.months.learn(asked)
        gate._ticker = asyncio.get_running_loop().create_task(gate._journal_progress())
        await gate.refresh()  # how many slots share the accounts
        return gate

    # -- a request ---------------------------------------------------------------------------------------------------

    async def hold(self, ask: Ask) -> Hold:
        """Set money aside and write INTENT. The plan, and so the price, are those of `ask.at_ms`; so is the
        billing month, or the next one when that one is being closed.

        Raises InsufficientQuota, PriceNotFound, LedgerUnavailable, Invalid; with an Idempotency-Key also
        AlreadyAnswered, IdempotencyInProgress, IdempotencyMismatch and IdempotencyExpired.
        """
        if ask.prompt_tokens_bound < 0 or ask.max_output_tokens < 0:  # it would make money
            raise Invalid("a request cannot use less than no tokens", "max_tokens")
        trouble = self._failure or self.journal.unhealthy()
        if trouble is not None:
            raise LedgerUnavailable(trouble, RETRY_AFTER_MS)
        plan = self._plans.find(ask) or await self._plans.make(ask)
        if ask.idempotency_key is not None:
            await self._claim(ask)
        tokens = next_window(0, ask.max_output_tokens) if ask.streamed else ask.max_output_tokens
        prompt = ask.prompt_tokens_bound
        usd = prompt * plan.prompt_usd + tokens * plan.output_usd
        cny = prompt * plan.prompt_cny + tokens * plan.output_cny
        parts = plan.draw(usd, cny)
        if parts is None:
            parts, tokens = await self._draw_or_release(ask, plan, tokens)
            usd = prompt * plan.prompt_usd + tokens * plan.output_usd
            cny = prompt * plan.prompt_cny + tokens * plan.output_cny
        hold = Hold(self, ask, plan, parts, usd, cny, tokens)
        self._open_holds += 1
        await self._intend(hold)
        for slice in plan.needing_more():
            self.leases.take_ahead(slice)
        return hold

    def ended(self, hold: Hold) -> None:
        """A hold was settled or voided."""
        self.moving.discard(hold)
        hold.month.running -= 1
        self._open_holds -= 1
        if not self._open_holds:
            self._all_ended.set()

    def journal_failed(self, error: LedgerError) -> None:
        """Nothing more is admitted: what was promised can no longer be recorded."""
        self._failure = f"the journal failed: {error}"
        log.error("journal failed", slot=self.leases.slot_id, error=str(error))

    async def _intend(self, hold: Hold) -> None:
        ask, plan = hold.ask, hold._plan
        spender = ask.spender
        intent = Intent(
            ask.request_id,
            ask.at_ms,
            hold.month.period,
            spender.team_id,
            spender.key_id,
            spender.end_user,
            ask.model,
            plan.price.version_id,
            ask.prompt_tokens_bound,
            hold.charges_held(),
            ask.idempotency_key,
            ask.deployment,
            plan.price.scope,
            spender.billing_currency,
        )
        try:
            await self.journal.append_written(intent)
        except BaseException:  # cancelled, or the journal failed: the caller never gets this hold
            await hold.void("not begun")
            raise

    # -- what waits for SQL --------------------------------------------------------------------------------------------

    async def draw_slowly(self, plan: Plan, prompt_tokens: int, wanted_tokens: int) -> tuple[list[Part], int]:
        """Lease more, ask other slots for what lies idle there, and at last make do with fewer output tokens.

        Returns what was drawn and the output tokens that it covers. Raises InsufficientQuota, LedgerUnavailable.
        """
        usd = prompt_tokens * plan.prompt_usd + wanted_tokens * plan.output_usd
        cny = prompt_tokens * plan.prompt_cny + wanted_tokens * plan.output_cny
        await self.fill(plan, usd, cny)
        limits = plan.limits()
        tokens = affordable_output(prompt_tokens, wanted_tokens, limits)
        if tokens is None or (tokens < 1 and wanted_tokens):
            raise self._insufficient(plan, prompt_tokens)
        usd = prompt_tokens * plan.prompt_usd + tokens * plan.output_usd
        cny = prompt_tokens * plan.prompt_cny + tokens * plan.output_cny
        parts = plan.draw(usd, cny, past_dry=True)
        assert parts is not None, "the tokens were cut to what is free"
        return parts, tokens

    async def fill(self, plan: Plan, usd_pico: int, cny_pico: int) -> None:
        """Bring the plan's slices to where they cover a cost, as far as there is money anywhere. LedgerUnavailable."""
        for _ in range(MAX_ROUNDS):
            short = await self._take(plan, usd_pico, cny_pico)
            if not short:
                return
            if not any(await asyncio.gather(*(self.leases.recall(slice.account_id) for slice in short))):
                return

    async def _take(self, plan: Plan, usd_pico: int, cny_pico: int) -> list[Slice]:
        """Lease what is missing. Returns the slices whose accounts did not have enough in SQL."""
        short: list[Slice] = []
        for slice, need in plan.short_budgets(usd_pico, cny_pico):
            await self.leases.take(slice, need)
            if slice.free < need:
                short.append(slice)
        need = usd_pico if plan.funding_in_usd else cny_pico
        for slice in plan.funding:
            missing = need - plan.free_funding()
            if missing <= 0:
                break
            await self.leases.take(slice, max(0, slice.free) + missing)
        if plan.free_funding() < need:
            short += plan.funding
        return short

    async def _draw_or_release(self, ask: Ask, plan: Plan, tokens: int) -> tuple[list[Part], int]:
        self._entering += 1
        try:
            return await self.draw_slowly(plan, ask.prompt_tokens_bound, tokens)
        except BaseException:
            if ask.idempotency_key is not None:
                await self._release_claim(ask)
            raise
        finally:
            self._entering -= 1

    async def _claim(self, ask: Ask) -> None:
        self._entering += 1
        try:
            await claim(self.db, ask, self.leases.slot_id, self.leases.epoch, self.clock())
        except LedgerUnavailable:  # it may be in SQL all the same
            self.leases.failed()
            self._doubtful_claims.add(ask.request_id)
            await self._release_claim(ask)
            raise
        except asyncio.CancelledError:  # so may this one, and nobody else would ever free its key
            self._doubtful_claims.add(ask.request_id)
            await self._release_claim(ask)
            raise
        finally:
            self._entering -= 1

    async def _release_claim(self, ask: Ask) -> None:
        """The request does not begin after all; the poster frees its key."""
        team_id, key_id = ask.spender.team_id, ask.spender.key_id
        now = self.clock()
        await self.journal.append_durable(
            Void(ask.request_id, now, "refused", None, ask.idempotency_key, team_id, key_id)
        )

    def _insufficient(self, plan: Plan, prompt_tokens: int) -> InsufficientQuota:
        usd, cny = prompt_tokens * plan.prompt_usd, prompt_tokens * plan.prompt_cny
        for slice, in_usd in plan.budgets:
            if slice.free < (usd + plan.output_usd if in_usd else cny + plan.output_cny):
                return InsufficientQuota("a spend budget of this key is used up; ask for a higher one", "budget")
        kind = plan.funding[-1].kind if plan.funding else "prepaid"
        return InsufficientQuota("the team's balance does not cover this request; top it up", kind)

    # -- keeping up ----------------------------------------------------------------------------------------------------

    async def refresh(self) -> bool:
        """Follow the change feed, answer recalls, return idle slices, beat the heart. Never raises for SQL being
        away. False: the feed has brought nothing since the last call."""
        leases, changed = self.leases, True
        try:
            async with self.db.read() as c:
                changes = await changes_since(c, self._seen)
                changed = bool(changes)
                recalled = await leases.recalled(c)
                reduced = await self._reductions.look(c, {change.team_id for change in changes})
                mine = (epochs.c.slot_id == leases.slot_id, epochs.c.epoch == leases.epoch)
                cursor = (await c.execute(select(epochs.c.cursor_seq).where(*mine))).scalar_one_or_none()
                if leases.down_since_ms is not None:
                    for account_id in await leases.reread(c):
                        log.error("SQL lost a lease: not spent any more until it is back", account=account_id)
                if any(change.subject_kind in ("price_version", "fx_rate", "team") for change in changes):
                    self._plans.book = await PriceBook.load(c, self.clock())
                if any(change.subject_kind == "month" for change in changes):
                    self.months.learn(await months_to_seal(c))
                    self._next_heartbeat_ms = 0  # tell SQL what still runs there
            leases.down_since_ms = None
            leases.resync()
            await self._doubtful_claims.release(self.db)
            self.journal.posted(cursor or 0)
            for change in changes:
                if change.subject_kind == "epoch":  # one of ours that was declared lost troubles us no more
                    self.lost_epochs.pop(change.subject_id, None)
            if changes:
                self._seen = changes[-1].seq
                self._plans.forget({change.team_id for change in changes})
                leases.hope_again()
            await self._seal()
            for slice in {*recalled, *self._idle_slices()}:
                await leases.give_back(slice)
            for slice in reduced:
                await leases.give_back(slice, 0)
            await self._beat()
        except Fenced as error:
            self._failure = str(error)
        except LedgerUnavailable:
            leases.failed()
        except DBAPIError as error:
            log.error("refresh refused", error=str(error.orig))
            leases.failed()
        return changed

    def degraded(self) -> list[str]:
        """What is not as it should be; empty when all is well."""
        found = [self._failure or self.journal.unhealthy()]
        if self.leases.down_since_ms is not None:
            found.append(f"SQL has been away for {(self.clock() - self.leases.down_since_ms) // 1000} s")
        return [reason for reason in (*found, *self.lost_epochs.values()) if reason is not None]

    async def close(self, *, patience_s: float = 10.0) -> None:
        """Wait for open holds, return every lease, end the journal. What is still open then is settled at the next
        start."""
        if self._closed:
            return
        self._closed = True
        self._failure = self._failure or "this worker is shutting down"
        if self._ticker is not None:
            self._ticker.cancel()
        if self._open_holds:
            self._all_ended.clear()
            try:
                await asyncio.wait_for(self._all_ended.wait(), patience_s)
            except TimeoutError:
                log.warning("closing with open requests", open=self._open_holds)
        try:
            if not self.leases.fenced:
                await self.leases.close()
                mine = (slots.c.id == self.leases.slot_id, slots.c.epoch == self.leases.epoch)
                async with self.db.begin() as c:
                    await c.execute(update(slots).where(*mine).values(live=0, heartbeat_ms=self.clock()))
                if not self._open_holds and not self._entering:
                    self.journal.append(EpochClosed(self.leases.epoch))
        except LedgerUnavailable as error:
            log.warning("leases are kept until the next start", error=str(error))
        finally:
            await self.journal.close()

    def _idle_slices(self) -> list[Slice]:
        now, idle = self.clock(), []
        if still_ahead(self._next_sweep_ms, now, SWEEP_MS):
            return []
        self._next_sweep_ms = now + SWEEP_MS
        for slice in self.leases.slices.values():
            if slice.dry and not still_ahead(slice.dry_until_ms, now, DRY_FOR_MS):
                slice.dry = False
            if slice.free != slice.seen_free or now < slice.idle_since_ms:
                slice.seen_free, slice.idle_since_ms = slice.free, now
            elif slice.free > 0 and now - slice.idle_since_ms > IDLE_MS:
                idle.append(slice)
        return idle

    async def _beat(self) -> None:
        now = self.clock()
        if still_ahead(self._next_heartbeat_ms, now, HEARTBEAT_MS):
            return
        self._next_heartbeat_ms = now + HEARTBEAT_MS
        mine = (slots.c.id == self.leases.slot_id, slots.c.epoch == self.leases.epoch)
        async with self.db.begin() as c:
            told = {"heartbeat_ms": now, "unsealed_requests": self.months.unsealed()}
            await c.execute(update(slots).where(*mine).values(told))

    async def _seal(self) -> None:
        for seal in self.months.due():
            try:
                await self.journal.append_durable(seal)
            except LedgerError as error:
                self.journal_failed(error)
                return
            self.months.sealed(seal)
            self._next_heartbeat_ms = 0

    async def _journal_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            moving, self.moving = self.moving, set()
            try:
                for hold in moving:
                    hold.journal_progress()
            except LedgerError as error:
                self.journal_failed(error)


def _require_room(files: Files, slot_dir: Path, segment_bytes: int) -> None:
    """Before SQL issues an epoch: each try on a full disk would leave one more there. Raises LedgerUnavailable."""
    try:
        free = files.free_bytes(slot_dir)
    except OSError as error:
        raise LedgerUnavailable(f"the journal's disk does not answer: {error}") from error
    if free < 2 * segment_bytes:
        raise LedgerUnavailable(
            f"the journal's disk has {free >> 20} MiB free and a new epoch needs {2 * segment_bytes >> 20} MiB: "
            f"free space on the file system of {slot_dir}"
        )


def _end_older(files: Files, slot_dir: Path, at_ms: int, accept_damage: str | None) -> list[Override]:
    """Before SQL issues an epoch: each try on a damaged journal would leave one more there. Raises JournalDamaged,
    LedgerUnavailable."""
    try:
        return close_epochs(files, slot_dir, at_ms, accept_damage=accept_damage)[1]
    except OSError as error:
        raise LedgerUnavailable(f"the journal in {slot_dir} cannot be opened: {error}") from error
