"""`tallygate invoice …`, `verify`: documents and the proof behind them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    CursorOption,
    DataDirOption,
    Fail,
    JsonOption,
    LimitOption,
    ReasonOption,
    act,
    by_operator,
    ledger_of,
    print_json,
    print_listing,
    print_record,
    print_table,
    progress,
    require_ledger,
    run,
    say,
    settings_in_use,
)

if TYPE_CHECKING:
    from ledger.corrections import Correction
    from ledger.database import Database
    from ledger.invoices import Read
    from ledger.verify import Report
    from proxy.admin.invoices import NewInvoice
    from proxy.settings import Settings

invoice = typer.Typer(no_args_is_help=True, help="Invoices: drafts, finalized ones, and documents of both.")

FORMATS = ("csv", "json", "xlsx", "pdf", "focus")
INVOICE_COLUMNS = ("number", "id", "team_id", "month", "kind", "state", "billed", "currency")
MonthOption = Annotated[str, typer.Option(help="YYYY-MM, in the team's time zone.")]
TeamOption = Annotated[str, typer.Option(help="The team's id or name.")]
InvoiceArgument = Annotated[str, typer.Argument(metavar="INVOICE_ID", help="The invoice's id.")]


@invoice.command("export", epilog="Example: tallygate invoice export --team demo --month 2026-11 --format xlsx")
def export(
    team: TeamOption,
    month: MonthOption,
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))] = "csv",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; - for standard output.")] = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Write a month's invoice, or its draft while it is not finalized, to a file."""
    from proxy.admin import invoices

    query = _checked(invoices.ExportQuery, {"team": team, "month": month, "format": format})
    document = act(settings_in_use(config, data_dir, json_), invoices.export, query=query)
    if output is not None and str(output) == "-":
        sys.stdout.buffer.write(document.content)
        return
    path = output or Path(document.filename)
    try:
        path.write_bytes(document.content)
    except OSError as error:
        raise Fail(f"cannot write {path}: {error.strerror}; name another file with --output", 2) from None
    if json_:
        print_json({"file": str(path), "bytes": len(document.content), "media_type": document.media_type})
    else:
        say(f"wrote {path} ({len(document.content)} bytes)")


@invoice.command("list", epilog="Example: tallygate invoice list --team demo")
def list_(
    team: Annotated[str | None, typer.Option(help="Only this team's.")] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List finalized, paid and void invoices."""
    from proxy.admin import invoices

    query = invoices.InvoiceFilter(team=team, limit=limit, cursor=cursor)
    found = act(settings_in_use(config, data_dir, json_), invoices.list_, query=query)
    print_listing(found, INVOICE_COLUMNS, json_, "none yet: tallygate invoice finalize --team TEAM --month YYYY-MM")


@invoice.command("finalize", epilog="Example: tallygate invoice finalize --team demo --month 2026-10")
def finalize(
    team: TeamOption,
    month: MonthOption,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Number and freeze a month that is over; it is closed first if it is not. Again: the same invoice."""
    from proxy.admin import invoices

    body, settings = (
        _checked(invoices.NewInvoice, {"team_id": team, "month": month}),
        settings_in_use(config, data_dir, json_),
    )
    prepared = run(_close_and_read(settings, body, reason))
    print_record(act(settings, invoices.create, body=body, reason=reason, writes=True, prepared=prepared), json_)


async def _close_and_read(settings: Settings, body: NewInvoice, reason: str | None) -> Read | None:
    from proxy.admin import invoices

    async with ledger_of(settings) as db:
        return await invoices.close_and_read(db, by_operator(reason), body)


@invoice.command("pay", epilog="Example: tallygate invoice pay inv_0jdz…")
def pay(
    invoice: InvoiceArgument,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Mark a finalized invoice as paid."""
    from proxy.admin import invoices

    path, settings = {"invoice": invoice}, settings_in_use(config, data_dir, json_)
    print_record(act(settings, invoices.pay, reason=reason, writes=True, path=path), json_)


@invoice.command("void", epilog='Example: tallygate invoice void inv_0jdz… --reason "wrong title"')
def void(
    invoice: InvoiceArgument,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Void a finalized invoice; its number stays used."""
    from proxy.admin import invoices

    path, settings = {"invoice": invoice}, settings_in_use(config, data_dir, json_)
    print_record(act(settings, invoices.void, reason=reason, writes=True, path=path), json_)


@invoice.command("credit", epilog='Example: tallygate invoice credit inv_0jdz… 5.00 --reference c1 --reason "outage"')
def credit(
    invoice: InvoiceArgument,
    amount: Annotated[str, typer.Argument(help="Whole cents or fen, in the invoice's currency.")],
    reference: Annotated[str, typer.Option(help="Yours, once for each invoice: again gives the same note.")],
    reason: Annotated[str, typer.Option(help="Why; stands on the credit note.")],
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Issue a credit note for part or all of an invoice."""
    from proxy.admin import invoices

    body = _checked(invoices.NewCreditNote, {"amount": amount, "reference": reference, "reason": reason})
    path, settings = {"invoice": invoice}, settings_in_use(config, data_dir, json_)
    note = act(settings, invoices.credit, reason=reason, writes=True, path=path, body=body)
    print_record(note, json_)


def verify(
    month: Annotated[str | None, typer.Option(help="Only this billing month, YYYY-MM.")] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Propose new entries that would put right what is wrong; posts none.")
    ] = False,
    approve: Annotated[str | None, typer.Option(help="Post this proposed correction. Needs --reason.")] = None,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Prove that usage, transfers, balances, journals and invoices agree; exit code 1 names the first difference.

    `--repair` proposes corrections, `--approve` posts one of them. Nothing that was posted is ever rewritten.
    """
    settings = settings_in_use(config, data_dir, json_)
    if approve is not None:
        _approve(settings, approve, reason, json_)
    elif repair:
        _propose(settings, json_)
    else:
        _prove(settings, month, json_)


def _prove(settings: Settings, month: str | None, json_: bool) -> None:
    from proxy.admin.proof import Proof

    body = _checked(Proof, {"month": month})
    report = run(_verify(settings, body.month))
    if json_:
        print_json(report)
    else:
        rows = [("ok" if check.ok else "WRONG", check.name, check.counted, check.difference) for check in report.checks]
        print_table(("result", "check", "counted", "first difference"), rows, "")
        if report.unposted:
            say(f"{report.unposted} settled requests are journalled and not yet posted")
    if not report.ok:
        if not json_:
            say(f"first difference: {report.first_difference}")
        raise typer.Exit(1)


def _propose(settings: Settings, json_: bool) -> None:
    """Exit code 1 while there is something to approve."""
    found = run(_proposed(settings))
    if json_:
        print_json({"data": found})
    else:
        rows = [(item.id, item.kind, item.words) for item in found]
        print_table(("id", "kind", "what is wrong"), rows, "nothing that a new entry could put right")
        if found:
            say('post one with: tallygate verify --approve ID --reason "…"; then look again')
    if found:
        raise typer.Exit(1)


def _approve(settings: Settings, correction_id: str, reason: str | None, json_: bool) -> None:
    if not reason:
        raise Fail("say with --reason why; it is kept in the audit chain", 2)
    print_record(run(_approved(settings, correction_id, reason)), json_)


async def _proposed(settings: Settings) -> list[Correction]:
    from ledger.corrections import propose

    async with _ledger_as_it_is(settings) as db, progress("verifying"):
        return await propose(db, settings.storage.journal_path)


async def _approved(settings: Settings, correction_id: str, reason: str) -> Correction:
    from ledger.corrections import approve

    async with _ledger_as_it_is(settings) as db, progress("verifying"):
        return await approve(db, settings.storage.journal_path, by_operator(reason), correction_id)


async def _verify(settings: Settings, month: str | None) -> Report:
    from ledger.verify import verify

    async with _ledger_as_it_is(settings) as db, progress("verifying") as step:
        return await verify(db, settings.storage.journal_path, month, progress=step)


@asynccontextmanager
async def _ledger_as_it_is(settings: Settings) -> AsyncIterator[Database]:
    """As `ledger_of`, for statements that take their time."""
    require_ledger(settings)
    from ledger.database import Database
    from ledger.migrations import require_current

    db = await Database.open(settings.storage.database)
    try:
        await require_current(db)
        yield db
    finally:
        await db.close()


def _checked(kind: Any, fields: dict[str, Any]) -> Any:
    """The fields as an input of the admin API. Raises Fail with its complaint."""
    import msgspec

    from proxy.admin.input import describe

    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise Fail(describe(error, kind, "option").message, 2) from None
