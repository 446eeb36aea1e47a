"""API keys. The database knows only a keyed hash of each; the key itself is shown once, when it is made.

A key belongs to one team for ever. Rotation gives it a new secret and lets the old one live on for an overlap.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Sequence
from hashlib import sha256
from ipaddress import ip_network
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.errors import Conflict, Invalid, NotFound
from ledger.ids import new_id
from ledger.money import Currency
from ledger.paging import Page, page
from ledger.schema import key_secrets, keys, teams
from ledger.teams import get_team

KeyState = Literal["active", "blocked", "deleted"]

KEY_START = "sk-tg-"
SHOWN_LETTERS = 6
"""How many letters of the secret part the prefix shows, to tell keys apart."""
SECRET_LETTERS = 43
"""62 letters to the power of 43: 256 bits."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class KeyHasher:
    """HMAC-SHA256 of keys under the server's own secret: a stolen database alone cannot be searched for keys."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise Invalid("the secret that keys are hashed with needs at least 16 bytes", "server.key_secret")
        self._mac = hmac.new(secret, digestmod=sha256)

    def __call__(self, key: str) -> str:
        """64 hex digits."""
        mac = self._mac.copy()
        mac.update(key.encode())
        return mac.hexdigest()


class Key(msgspec.Struct, frozen=True):
    """A key as administrators see it. None in `models`, `drafts` or `allowed_ips`: no restriction."""

    id: str
    team_id: str
    name: str
    prefix: str
    state: KeyState
    expires_at_ms: int | None
    models: tuple[str, ...] | None
    drafts: tuple[str, ...] | None
    allowed_ips: tuple[str, ...] | None
    end_user_required: bool
    created_ms: int


class NewKey(msgspec.Struct, frozen=True):
    """A key with its secret, which nobody can read again."""

    key: Key
    secret: str


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """What to change; what is UNSET stays, None lifts a restriction."""

    name: str | UnsetType = UNSET
    state: Literal["active", "blocked"] | UnsetType = UNSET
    expires_at_ms: int | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    drafts: tuple[str, ...] | UnsetType | None = UNSET
    allowed_ips: tuple[str, ...] | UnsetType | None = UNSET
    end_user_required: bool | UnsetType = UNSET


class KeyRecord(msgspec.Struct, frozen=True):
    """What authentication needs to know, of the key and of its team."""

    key_id: str
    key_name: str
    team_id: str
    team_name: str
    billing_currency: Currency
    timezone: str
    state: KeyState
    expires_at_ms: int | None
    """When this secret stops working: the key's expiry, or the end of a rotation's overlap if that is earlier."""
    models: tuple[str, ...] | None
    drafts: tuple[str, ...] | None
    allowed_ips: tuple[str, ...] | None
    end_user_required: bool


async def create_key(
    c: AsyncConnection,
    by: By,
    hasher: KeyHasher,
    team_id: str,
    *,
    name: str = "",
    expires_at_ms: int | None = None,
    models: Iterable[str] | None = None,
    drafts: Iterable[str] | None = None,
    allowed_ips: Iterable[str] | None = None,
    end_user_required: bool = False,
    secret: str | None = None,
) -> NewKey:
    """A new active key. Raises NotFound for an unknown team, Invalid; Conflict when a given `secret` is in use."""
    await audit.lock(c)
    await get_team(c, team_id)
    secret = secret or new_secret()
    key = Key(
        id=new_id("key", by.at_ms),
        team_id=team_id,
        name=name or "key",
        prefix=secret[: len(KEY_START) + SHOWN_LETTERS],
        state="active",
        expires_at_ms=expires_at_ms,
        models=_tuple(models),
        drafts=_tuple(drafts),
        allowed_ips=_tuple(allowed_ips),
        end_user_required=end_user_required,
        created_ms=by.at_ms,
    )
    _check(key)
    if await find_by_hash(c, hasher(secret)) is not None:
        raise Conflict("this key is in use already")
    await c.execute(insert(keys).values(_columns(key)))
    await c.execute(insert(key_secrets).values(secret_hash=hasher(secret), key_id=key.id))
    await audit.record(c, by, "key.create", "key", key.id, team_id=team_id, after=key)
    return NewKey(key, secret)


async def update_key(c: AsyncConnection, by: By, key_id: str, change: KeyChange) -> Key:
    """Raises NotFound (also for a deleted key), Invalid."""
    await audit.lock(c)
    before = await get_key(c, key_id)
    if before.state == "deleted":
        raise NotFound(f"no key {key_id!r}")
    changed = {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}
    after = msgspec.structs.replace(before, **changed)
    _check(after)
    return await _store(c, by, "key.update", before, after)


async def block_key(c: AsyncConnection, by: By, key_id: str, *, blocked: bool = True) -> Key:
    """Blocks or unblocks. Raises NotFound (also for a deleted key)."""
    return await update_key(c, by, key_id, KeyChange(state="blocked" if blocked else "active"))


async def delete_key(c: AsyncConnection, by: By, key_id: str) -> Key:
    """For good: the row stays for the history, no secret of it works again. Raises NotFound."""
    await audit.lock(c)
    before = await get_key(c, key_id)
    return await _store(c, by, "key.delete", before, msgspec.structs.replace(before, state="deleted"))


async def rotate_key(c: AsyncConnection, by: By, hasher: KeyHasher, key_id: str, *, overlap_s: int = 0) -> NewKey:
    """A new secret for a key; older ones work for `overlap_s` more seconds at most. Raises NotFound, Invalid."""
    if overlap_s < 0:
        raise Invalid("the overlap cannot be negative", "overlap_s")
    await audit.lock(c)
    before = await get_key(c, key_id)
    if before.state == "deleted":
        raise NotFound(f"no key {key_id!r}")
    until_ms = by.at_ms + overlap_s * 1000
    longer = (key_secrets.c.valid_until_ms.is_(None)) | (key_secrets.c.valid_until_ms > until_ms)
    older = update(key_secrets).where(key_secrets.c.key_id == key_id, longer)
    await c.execute(older.values(valid_until_ms=until_ms))
    secret = new_secret()
    await c.execute(insert(key_secrets).values(secret_hash=hasher(secret), key_id=key_id))
    after = msgspec.structs.replace(before, prefix=secret[: len(KEY_START) + SHOWN_LETTERS])
    await _store(c, by, "key.rotate", before, after)
    return NewKey(after, secret)


async def get_key(c: AsyncConnection, key_id: str) -> Key:
    """Raises NotFound. A deleted key is still found, with that state."""
    row = (await c.execute(select(keys).where(keys.c.id == key_id))).one_or_none()
    if row is None:
        raise NotFound(f"no key {key_id!r}")
    return _key(row)


async def list_keys(
    c: AsyncConnection, team_id: str | None = None, *, cursor: str | None = None, limit: int = 100
) -> Page[Key]:
    """Oldest first, without deleted ones."""
    query = select(keys).where(keys.c.state != "deleted")
    if team_id is not None:
        query = query.where(keys.c.team_id == team_id)
    return await page(c, query, [keys.c.created_ms, keys.c.id], _key, cursor=cursor, limit=limit)


async def find_by_hash(c: AsyncConnection, secret_hash: str) -> KeyRecord | None:
    """The key that a secret's hash belongs to, in whatever state it is; the caller decides whether it may pass."""
    query = (
        select(keys, key_secrets.c.valid_until_ms, teams.c.name.label("team_name"))
        .add_columns(teams.c.billing_currency, teams.c.timezone)
        .join(key_secrets, key_secrets.c.key_id == keys.c.id)
        .join(teams, teams.c.id == keys.c.team_id)
        .where(key_secrets.c.secret_hash == secret_hash)
    )
    row = (await c.execute(query)).one_or_none()
    if row is None:
        return None
    key = _key(row)
    ends = [end for end in (key.expires_at_ms, row.valid_until_ms) if end is not None]
    return KeyRecord(
        key_id=key.id,
        key_name=key.name,
        team_id=key.team_id,
        team_name=row.team_name,
        billing_currency=row.billing_currency,
        timezone=row.timezone,
        state=key.state,
        expires_at_ms=min(ends, default=None),
        models=key.models,
        drafts=key.drafts,
        allowed_ips=key.allowed_ips,
        end_user_required=key.end_user_required,
    )


def new_secret() -> str:
    return KEY_START + "".join(secrets.choice(_LETTERS) for _ in range(SECRET_LETTERS))


async def _store(c: AsyncConnection, by: By, action: str, before: Key, after: Key) -> Key:
    if after == before:
        return before
    await c.execute(update(keys).where(keys.c.id == after.id).values(_columns(after)))
    await audit.record(c, by, action, "key", after.id, team_id=after.team_id, before=before, after=after)
    return after


def _check(key: Key) -> None:
    if not key.name.strip():
        raise Invalid("a key needs a name", "name")
    for address in key.allowed_ips or ():
        try:
            ip_network(address, strict=False)
        except ValueError:
            raise Invalid(f"not an address or network: {address!r}", "allowed_ips") from None


def key_row(key: dict[str, Any]) -> dict[str, Any]:
    """The columns of a key, from its fields by name."""
    lists = {name: _json(key[name]) for name in ("models", "drafts", "allowed_ips")}
    return key | lists | {"end_user_required": int(key["end_user_required"])}


def _columns(key: Key) -> dict[str, Any]:
    return key_row(msgspec.structs.asdict(key))


def _key(row: Any) -> Key:
    values = {name: row._mapping[keys.c[name]] for name in Key.__struct_fields__}
    for name in ("models", "drafts", "allowed_ips"):
        if values[name] is not None:
            values[name] = msgspec.json.decode(values[name], type=tuple[str, ...])
    return Key(**values | {"end_user_required": bool(values["end_user_required"])})


def _tuple(values: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _json(values: Sequence[str] | None) -> str | None:
    return None if values is None else msgspec.json.encode(values).decode()
