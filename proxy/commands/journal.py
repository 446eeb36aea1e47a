"""`tallygate journal …`: what an operator decides about journals: which are lost, and which damage is borne."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    DataDirOption,
    Fail,
    JsonOption,
    by_operator,
    ledger_of,
    print_json,
    print_table,
    run,
    settings_in_use,
)

if TYPE_CHECKING:
    from proxy.settings import Settings

journal = typer.Typer(no_args_is_help=True, help="Journals of the gateway slots, for the rare day.")

ReasonNeeded = Annotated[str, typer.Option(help="Why; kept in the audit chain.")]


@journal.command("list", epilog="Example: tallygate journal list")
def list_(config: ConfigOption = None, data_dir: DataDirOption = HERE, json_: JsonOption = False) -> None:
    """Epochs that are not closed, with what their leases still lock."""
    found = run(_open_epochs(settings_in_use(config, data_dir, json_)))
    if json_:
        print_json({"data": found})
        return
    columns = ("slot", "epoch", "live", "locked")
    print_table(columns, [[row[name] for name in columns] for row in found], "every epoch is closed")


async def _open_epochs(settings: Settings) -> list[dict[str, Any]]:
    from ledger.lost_journals import list_open_epochs, open_leases
    from ledger.money import format_amount

    async with ledger_of(settings) as db, db.read() as c:
        found = []
        for slot_id, epoch, live in await list_open_epochs(c):
            leases = await open_leases(c, slot_id, epoch)
            locked = ", ".join(f"{format_amount(pico)} {currency}" for _, currency, pico in leases)
            found.append({"slot": slot_id, "epoch": epoch, "live": live, "locked": locked or "nothing"})
        return found


@journal.command("declare-lost", epilog='Example: tallygate journal declare-lost HOST/0 12 --reason "disk gone"')
def declare_lost(
    slot: Annotated[str, typer.Argument(help="The slot, as `journal list` shows it.")],
    epoch: Annotated[int, typer.Argument(help="The epoch whose journal will never come back.")],
    reason: ReasonNeeded,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Give up an epoch's journal: its leases return, what it had not posted is lost to the bill."""
    freed = run(_declare_lost(settings_in_use(config, data_dir, json_), slot, epoch, reason))
    if json_:
        names = ("account", "currency", "amount")
        print_json({"freed": [dict(zip(names, row, strict=True)) for row in freed]})
        return
    print_table(("account", "currency", "amount"), freed, "nothing was locked")


async def _declare_lost(settings: Settings, slot: str, epoch: int, reason: str) -> list[tuple[str, str, str]]:
    from ledger.lost_journals import declare_lost
    from ledger.money import format_amount

    async with ledger_of(settings) as db, db.begin() as c:
        freed = await declare_lost(c, by_operator(reason), slot, epoch)
        return [(account, currency, format_amount(pico)) for account, currency, pico in freed]


@journal.command("accept-damage", epilog='Example: tallygate journal accept-damage --slot 0 --reason "no copy exists"')
def accept_damage(
    slot: Annotated[int, typer.Option(min=0, help="The slot's number on this host.")],
    reason: ReasonNeeded,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Go on without frames that were durable and do not read; what they settled is lost to the bill. Stop `serve`
    first."""
    overrides = run(_accept_damage(settings_in_use(config, data_dir, json_), slot, reason))
    if json_:
        print_json({"data": overrides})
        return
    if not overrides:
        raise Fail(f"the journal of slot {slot} is not damaged: nothing was done")
    rows = [(item.epoch_dir, item.last_good_seq, item.damage) for item in overrides]
    print_table(("epoch", "last good frame", "damage"), rows, "")


async def _accept_damage(settings: Settings, slot: int, reason: str) -> list[Any]:
    from ledger import audit
    from ledger.gate import Gate

    async with ledger_of(settings) as db:
        gate = await Gate.open(db, settings.storage.journal_path, slot, accept_damage=reason)
        overrides = list(gate.journal.overrides)
        async with db.begin() as c:
            for item in overrides:
                await audit.record(c, by_operator(reason), "journal.accept_damage", "epoch", item.epoch_dir, after=item)
        await gate.close(patience_s=0)
        return overrides
