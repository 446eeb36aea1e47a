"""`tallygate suspense …`: records that SQL refused, and what becomes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    DataDirOption,
    JsonOption,
    act,
    print_listing,
    print_record,
    settings_in_use,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from proxy.admin.endpoints import Call
    from proxy.admin.journals import SuspendedAnswer

suspense = typer.Typer(no_args_is_help=True, help="Records that could not be posted: look, post again, give up.")

COLUMNS = ("slot", "epoch", "frame", "request_id", "refused_because", "at", "resolved_at")
SlotArgument = Annotated[str, typer.Argument(help="The slot, as `suspense list` shows it.")]
EpochArgument = Annotated[int, typer.Argument(help="The epoch.")]
FrameArgument = Annotated[int, typer.Argument(help="The frame.")]
ReasonNeeded = Annotated[str, typer.Option(help="Why; kept in the audit chain.")]


@suspense.command("list", epilog="Example: tallygate suspense list")
def list_(
    resolved: Annotated[bool, typer.Option("--resolved", help="Also those that were decided.")] = False,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Records that wait for a decision. While there is one, `verify` fails and its amount stays locked."""
    from proxy.admin import journals

    found = act(
        settings_in_use(config, data_dir, json_),
        journals.list_suspense,
        query=journals.SuspenseFilter(resolved=resolved),
    )
    print_listing(found, COLUMNS, json_, "nothing is in suspense")


@suspense.command("retry", epilog='Example: tallygate suspense retry HOST/0 12 345 --reason "the account exists now"')
def retry(
    slot: SlotArgument,
    epoch: EpochArgument,
    frame: FrameArgument,
    reason: ReasonNeeded,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Post a record exactly as it stands, once its obstacle is gone."""
    from proxy.admin import journals

    _decide(journals.retry, slot, epoch, frame, reason, config, data_dir, json_)


@suspense.command("write-off", epilog='Example: tallygate suspense write-off HOST/0 12 345 --reason "cannot be mended"')
def write_off(
    slot: SlotArgument,
    epoch: EpochArgument,
    frame: FrameArgument,
    reason: ReasonNeeded,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Give a record up: nobody is billed for it, and what it locked is free again."""
    from proxy.admin import journals

    _decide(journals.write_off, slot, epoch, frame, reason, config, data_dir, json_)


def _decide(
    decide: Callable[[Call], Awaitable[SuspendedAnswer]],
    slot: str,
    epoch: int,
    frame: int,
    reason: str,
    config: Path | None,
    data_dir: Path,
    json_: bool,
) -> None:
    from proxy.admin.journals import Decision

    body = Decision(slot=slot, epoch=epoch, frame=frame, reason=reason)
    print_record(act(settings_in_use(config, data_dir, json_), decide, body=body, writes=True), json_)
