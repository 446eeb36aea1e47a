"""Tokens of the admin API, each with a role. Stored as a keyed hash, shown once."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.errors import Invalid, NotFound
from ledger.ids import new_id
from ledger.keys import KeyHasher
from ledger.paging import Page, page
from ledger.schema import admin_tokens

Role = Literal["admin", "finance", "viewer"]
ROLES: tuple[Role, ...] = ("admin", "finance", "viewer")
TOKEN_START = "tg-admin-"


class AdminToken(msgspec.Struct, frozen=True):
    """A token as administrators see it."""

    id: str
    name: str
    role: Role
    created_ms: int
    revoked_ms: int | None


class NewAdminToken(msgspec.Struct, frozen=True):
    """A token with its secret, which nobody can read again."""

    token: AdminToken
    secret: str


async def create_admin_token(
    c: AsyncConnection, by: By, hasher: KeyHasher, name: str, role: Role, *, secret: str | None = None
) -> NewAdminToken:
    """A new token. With a `secret` of the caller's own (the configured one) a repeated call gives the same token, also
    when it was revoked. Raises Invalid."""
    await audit.lock(c)
    if role not in ROLES:
        raise Invalid(f"unknown role {role!r}: use {', '.join(ROLES)}", "role")
    if not name.strip():
        raise Invalid("a token needs a name", "name")
    given = secret or TOKEN_START + secrets.token_urlsafe(32)
    row = (await c.execute(_columns().where(admin_tokens.c.token_hash == hasher(given)))).one_or_none()
    if row is not None:
        return NewAdminToken(_token(row), given)
    token = AdminToken(new_id("token", by.at_ms), name, role, by.at_ms, None)
    await c.execute(insert(admin_tokens).values(**msgspec.structs.asdict(token), token_hash=hasher(given)))
    await audit.record(c, by, "admin_token.create", "admin_token", token.id, after=token)
    return NewAdminToken(token, given)


async def revoke_admin_token(c: AsyncConnection, by: By, token_id: str) -> AdminToken:
    """Raises NotFound. A token revoked before stays as it is."""
    await audit.lock(c)
    row = (await c.execute(_columns().where(admin_tokens.c.id == token_id))).one_or_none()
    if row is None:
        raise NotFound(f"no admin token {token_id!r}")
    before = _token(row)
    if before.revoked_ms is not None:
        return before
    after = msgspec.structs.replace(before, revoked_ms=by.at_ms)
    await c.execute(update(admin_tokens).where(admin_tokens.c.id == token_id).values(revoked_ms=by.at_ms))
    await audit.record(c, by, "admin_token.revoke", "admin_token", token_id, before=before, after=after)
    return after


async def find_admin_token(c: AsyncConnection, token_hash: str) -> AdminToken | None:
    """The valid token with that hash; None when there is none or it was revoked."""
    query = _columns().where(admin_tokens.c.token_hash == token_hash, admin_tokens.c.revoked_ms.is_(None))
    row = (await c.execute(query)).one_or_none()
    return None if row is None else _token(row)


async def list_admin_tokens(c: AsyncConnection, *, cursor: str | None = None, limit: int = 100) -> Page[AdminToken]:
    """Oldest first, revoked ones too."""
    key = [admin_tokens.c.created_ms, admin_tokens.c.id]
    return await page(c, _columns(), key, _token, cursor=cursor, limit=limit)


def _columns() -> Any:
    return select(*(admin_tokens.c[name] for name in AdminToken.__struct_fields__))


def _token(row: Any) -> AdminToken:
    return AdminToken(**row._mapping)
