"""`tallygate webhook …`: what webhooks were told, and what they have not taken."""

from __future__ import annotations

from typing import Annotated

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
    print_listing,
    settings_in_use,
)

webhook = typer.Typer(no_args_is_help=True, help="Webhooks: what they were told, and what they have not taken.")

COLUMNS = ("event_id", "type", "webhook", "state", "attempts", "happened_at", "next_attempt_at", "last_error")


@webhook.command("list", epilog="Example: tallygate webhook list --state given_up")
def list_(
    state: Annotated[str | None, typer.Option(help="Only these: waiting, delivered or given_up.")] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Deliveries, of the newest events first: where each stands, and what went wrong last."""
    from proxy.admin import webhooks

    if state not in (None, "waiting", "delivered", "given_up"):
        raise Fail(f"no delivery is {state!r}: they are waiting, delivered or given_up", 2)
    query = webhooks.DeliveryFilter(state=state, limit=limit, cursor=cursor)  # type: ignore[arg-type]
    print_listing(
        act(settings_in_use(config, data_dir, json_), webhooks.list_, query=query), COLUMNS, json_, "no deliveries"
    )


@webhook.command("retry", epilog="Example: tallygate webhook retry event_01jdz")
def retry(
    event_id: Annotated[str, typer.Argument(help="The event, as `webhook list` shows it.")],
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Tell an event again at once, with all attempts before it, where it was not taken; also what was given up."""
    from proxy.admin import webhooks

    settings, body = settings_in_use(config, data_dir, json_), webhooks.RetryBody(event_id=event_id)
    print_listing(act(settings, webhooks.retry, body=body, reason=reason, writes=True), COLUMNS, json_, "")
