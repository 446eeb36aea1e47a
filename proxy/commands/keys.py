"""`tallygate key …`: API keys. The secret is printed once, when it is made."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    CursorOption,
    DataDirOption,
    JsonOption,
    LimitOption,
    ReasonOption,
    act,
    print_listing,
    print_record,
    say,
    settings_in_use,
)

key = typer.Typer(no_args_is_help=True, help="API keys.")

KeyArgument = Annotated[str, typer.Argument(metavar="KEY_ID", help="The key's id, as `key list` shows it.")]
COLUMNS = ("id", "team_id", "name", "prefix", "state", "expires_at", "models", "drafts", "allowed_ips")
BRIEF = ("id", "name", "state", "team_id", "expires_at", "models", "drafts")
SHOWN_ONCE = "the key is shown this once: keep it"


@key.command("create", epilog='Example: tallygate key create --team "Web shop" --name production --model deepseek-v3.2')
def create(
    team: Annotated[str, typer.Option(help="The team's id or name.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    expires: Annotated[str | None, typer.Option(help="A date or time.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this model; repeat for more.")] = None,
    draft: Annotated[list[str] | None, typer.Option(help="Only this draft model; repeat for more.")] = None,
    allow_ip: Annotated[list[str] | None, typer.Option(help="Only from this address or network; repeat.")] = None,
    end_user_required: Annotated[bool, typer.Option(help="Requests must name their end user.")] = False,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Create a key and print it, this once."""
    from proxy.admin import keys

    body = keys.NewKeyBody(
        team_id=team,
        name=name,
        expires_at=expires,
        models=tuple(model) if model else None,
        drafts=tuple(draft) if draft else None,
        allowed_ips=tuple(allow_ip) if allow_ip else None,
        end_user_required=end_user_required,
    )
    made = act(
        settings_in_use(config, data_dir, json_), keys.create, body=body, reason=reason, writes=True, hashes=True
    )
    print_record(made, json_)
    if not json_:
        say(SHOWN_ONCE)


@key.command("list", epilog='Example: tallygate key list --team "Web shop"')
def list_(
    team: Annotated[str | None, typer.Option(help="Only this team's.")] = None,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List keys, the oldest first."""
    from proxy.admin import keys

    query = keys.KeyFilter(team=team, limit=limit, cursor=cursor)
    found = act(settings_in_use(config, data_dir, json_), keys.list_, query=query)
    print_listing(found, COLUMNS, json_, "no keys yet: tallygate key create --team TEAM", brief=BRIEF)


@key.command("rotate", epilog="Example: tallygate key rotate key_0jdz… --overlap 3600")
def rotate(
    key: KeyArgument,
    overlap: Annotated[int, typer.Option(help="For how many seconds the old secret still works.")] = 0,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Give a key a new secret and print it, this once."""
    from proxy.admin import keys

    body, settings = keys.Rotation(overlap_s=overlap), settings_in_use(config, data_dir, json_)
    made = act(settings, keys.rotate, body=body, reason=reason, writes=True, hashes=True, path={"key": key})
    print_record(made, json_)
    if not json_:
        say(SHOWN_ONCE)


@key.command("block", epilog='Example: tallygate key block key_0jdz… --reason "leaked in a log"')
def block(
    key: KeyArgument,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Block a key; every gateway refuses it within a second."""
    from proxy.admin import keys

    body, settings = keys.KeyPatch(state="blocked"), settings_in_use(config, data_dir, json_)
    print_record(act(settings, keys.patch, body=body, reason=reason, writes=True, path={"key": key}), json_)


@key.command("unblock", epilog="Example: tallygate key unblock key_0jdz…")
def unblock(
    key: KeyArgument,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Let a blocked key work again."""
    from proxy.admin import keys

    body, settings = keys.KeyPatch(state="active"), settings_in_use(config, data_dir, json_)
    print_record(act(settings, keys.patch, body=body, reason=reason, writes=True, path={"key": key}), json_)


@key.command("delete", epilog="Example: tallygate key delete key_0jdz…")
def delete(
    key: KeyArgument,
    reason: ReasonOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Delete a key for good; its usage stays."""
    from proxy.admin import keys

    print_record(
        act(settings_in_use(config, data_dir, json_), keys.delete, reason=reason, writes=True, path={"key": key}), json_
    )
