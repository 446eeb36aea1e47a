"""`tallygate admin-token …` and `audit`: who may administer, and who did what."""

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
    print_record,
    settings_in_use,
)

admin_token = typer.Typer(no_args_is_help=True, help="Tokens of the admin API.")

TOKEN_COLUMNS = ("id", "name", "role", "created_at", "revoked_at")
AUDIT_BRIEF = ("seq", "at", "actor", "action", "subject_id", "reason")
AUDIT_COLUMNS = ("seq", "at", "actor", "action", "subject_id", "team_id", "reason")


@admin_token.command("create", epilog="Example: tallygate admin-token create controller --role finance")
def create(
    name: Annotated[str, typer.Argument(help="Who or what it is for.")],
    role: Annotated[str, typer.Option(help="admin, finance (read, invoices, top-ups) or viewer.")] = "admin",
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Make a token and print it, this once."""
    import msgspec

    from proxy.admin import tokens

    try:
        body = msgspec.convert({"name": name, "role": role}, tokens.NewToken)
    except msgspec.ValidationError:
        raise Fail(f"no role {role!r}: use admin, finance or viewer", 2) from None
    made = act(
        settings_in_use(config, data_dir, json_), tokens.create, body=body, reason=reason, writes=True, hashes=True
    )
    print_record(made, json_)


@admin_token.command("list", epilog="Example: tallygate admin-token list")
def list_(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List tokens, without their secrets."""
    from proxy.admin import tokens
    from proxy.admin.endpoints import Paging

    found = act(settings_in_use(config, data_dir, json_), tokens.list_, query=Paging(limit=limit, cursor=cursor))
    print_listing(found, TOKEN_COLUMNS, json_, "no tokens yet: tallygate admin-token create NAME")


@admin_token.command("revoke", epilog="Example: tallygate admin-token revoke token_0jdz…")
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="The token's id.")],
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Revoke a token."""
    from proxy.admin import tokens

    print_record(
        act(settings_in_use(config, data_dir, json_), tokens.revoke, reason=reason, writes=True, path={"token": token}),
        json_,
    )


def audit(
    team: Annotated[str | None, typer.Option(help="Only what touched this team (its id).")] = None,
    subject: Annotated[str | None, typer.Option(help="Only what touched this key, price version …")] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Who did what, the newest first."""
    from proxy.admin import audit as acts

    query = acts.AuditFilter(team=team, subject=subject, limit=limit, cursor=cursor)
    print_listing(
        act(settings_in_use(config, data_dir, json_), acts.list_, query=query),
        AUDIT_COLUMNS,
        json_,
        "nothing yet",
        brief=AUDIT_BRIEF,
    )
