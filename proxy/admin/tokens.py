"""Who calls the admin API, and the tokens they call with."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from ledger import admin_tokens
from ledger.admin_tokens import AdminToken
from ledger.database import Database
from ledger.keys import KeyHasher
from proxy.admin.endpoints import ADMIN, Call, Endpoint, Installation, Listing, Paging, Role, Strict
from proxy.admin.times import iso, required_iso
from proxy.openai.errors import invalid_api_key


@dataclass(frozen=True)
class Caller:
    """`actor` goes into the audit chain."""

    actor: str
    role: Role


class NewToken(Strict, frozen=True, kw_only=True):
    """Roles: admin (all), finance (read, invoices, top-ups), viewer (read)."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    role: Role


class TokenAnswer(msgspec.Struct, frozen=True):
    id: str
    name: str
    role: str
    created_at: str
    revoked_at: str | None

    @classmethod
    def of(cls, token: AdminToken) -> TokenAnswer:
        return cls(**_fields(token))


class NewTokenAnswer(msgspec.Struct, frozen=True):
    """`token` is the secret: it is not stored and cannot be shown again."""

    id: str
    token: str
    name: str
    role: str
    created_at: str
    revoked_at: str | None


def _fields(token: AdminToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role,
        "created_at": required_iso(token.created_ms),
        "revoked_at": iso(token.revoked_ms),
    }


async def authenticate(request: Request, db: Database, installation: Installation) -> Caller:
    """The caller of a request. Raises ApiError 401, LedgerUnavailable.

    The configured token is compared in constant time; others are found by their keyed hash, which tells an attacker
    nothing about how near a guess was.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise invalid_api_key("an admin token is needed: Authorization: Bearer …")
    configured = installation.settings.admin_token
    if configured is not None and hmac.compare_digest(token.encode(), configured.encode()):
        return Caller("admin:configured", "admin")
    async with db.read() as c:
        found = await admin_tokens.find_admin_token(c, KeyHasher(installation.key_secret)(token))
    if found is None:
        raise invalid_api_key("this admin token is not known or was revoked")
    return Caller(f"admin:{found.id}", found.role)


async def create(call: Call) -> NewTokenAnswer:
    body: NewToken = call.body
    hasher = KeyHasher(call.installation.key_secret)
    new = await admin_tokens.create_admin_token(call.c, call.by, hasher, body.name, body.role)
    return NewTokenAnswer(token=new.secret, **_fields(new.token))


async def list_(call: Call) -> Listing[TokenAnswer]:
    found = await admin_tokens.list_admin_tokens(call.c, cursor=call.query.cursor, limit=call.query.limit)
    return Listing([TokenAnswer.of(token) for token in found.items], found.next_cursor)


async def revoke(call: Call) -> TokenAnswer:
    return TokenAnswer.of(await admin_tokens.revoke_admin_token(call.c, call.by, call.path["token"]))


ENDPOINTS = [
    Endpoint("POST", "/admin-tokens", "Make an admin token", create, NewTokenAnswer, body=NewToken, status=201),
    Endpoint("GET", "/admin-tokens", "List admin tokens", list_, Listing[TokenAnswer], ADMIN, query=Paging),
    Endpoint("DELETE", "/admin-tokens/{token}", "Revoke an admin token", revoke, TokenAnswer),
]
