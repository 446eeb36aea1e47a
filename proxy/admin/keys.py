"""API keys. The secret is in the answer that makes it, and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ledger import keys, teams
from ledger.keys import Key, KeyChange, KeyHasher, NewKey
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.times import Instant, iso, parse_instant, required_iso

MAX_OVERLAP_S = 90 * 86_400


class NewKeyBody(Strict, frozen=True, kw_only=True):
    """Only the team is required; null means no restriction."""

    team_id: str
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""
    expires_at: Instant | None = None
    models: tuple[str, ...] | None = None
    drafts: tuple[str, ...] | None = None
    allowed_ips: tuple[str, ...] | None = None
    end_user_required: bool = False
    state: Literal["active", "blocked"] = "active"


class KeyPatch(Strict, frozen=True, kw_only=True):
    """What is absent stays; null lifts a restriction."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | UnsetType = UNSET
    expires_at: Instant | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    drafts: tuple[str, ...] | UnsetType | None = UNSET
    allowed_ips: tuple[str, ...] | UnsetType | None = UNSET
    end_user_required: bool | UnsetType = UNSET
    state: Literal["active", "blocked"] | UnsetType = UNSET


class Rotation(Strict, frozen=True, kw_only=True):
    """For how many seconds the old secret still works."""

    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_OVERLAP_S)] = 0


class KeyFilter(Paging, frozen=True, kw_only=True):
    team: str | None = None


class KeyAnswer(msgspec.Struct, frozen=True):
    id: str
    team_id: str
    name: str
    prefix: str
    state: str
    expires_at: str | None
    models: tuple[str, ...] | None
    drafts: tuple[str, ...] | None
    allowed_ips: tuple[str, ...] | None
    end_user_required: bool
    created_at: str

    @classmethod
    def of(cls, key: Key) -> KeyAnswer:
        return cls(**_fields(key))


class NewKeyAnswer(msgspec.Struct, frozen=True):
    """`key` is the secret: it is not stored and cannot be shown again."""

    id: str
    key: str
    team_id: str
    name: str
    prefix: str
    state: str
    expires_at: str | None
    models: tuple[str, ...] | None
    drafts: tuple[str, ...] | None
    allowed_ips: tuple[str, ...] | None
    end_user_required: bool
    created_at: str

    @classmethod
    def of(cls, new: NewKey) -> NewKeyAnswer:
        return cls(key=new.secret, **_fields(new.key))


def _fields(key: Key) -> dict[str, Any]:
    return {
        "id": key.id,
        "team_id": key.team_id,
        "name": key.name,
        "prefix": key.prefix,
        "state": key.state,
        "expires_at": iso(key.expires_at_ms),
        "models": key.models,
        "drafts": key.drafts,
        "allowed_ips": key.allowed_ips,
        "end_user_required": key.end_user_required,
        "created_at": required_iso(key.created_ms),
    }


def _hasher(call: Call) -> KeyHasher:
    return KeyHasher(call.installation.key_secret)


async def create(call: Call) -> NewKeyAnswer:
    body: NewKeyBody = call.body
    team = await teams.find_team(call.c, body.team_id)
    new = await keys.create_key(
        call.c,
        call.by,
        _hasher(call),
        team.id,
        name=body.name,
        expires_at_ms=parse_instant(body.expires_at, "expires_at", team.timezone),
        models=body.models,
        drafts=body.drafts,
        allowed_ips=body.allowed_ips,
        end_user_required=body.end_user_required,
    )
    if body.state == "blocked":
        new = msgspec.structs.replace(new, key=await keys.block_key(call.c, call.by, new.key.id))
    return NewKeyAnswer.of(new)


async def list_(call: Call) -> Listing[KeyAnswer]:
    query: KeyFilter = call.query
    team_id = None if query.team is None else (await teams.find_team(call.c, query.team)).id
    found = await keys.list_keys(call.c, team_id, cursor=query.cursor, limit=query.limit)
    return Listing([KeyAnswer.of(key) for key in found.items], found.next_cursor)


async def get(call: Call) -> KeyAnswer:
    return KeyAnswer.of(await keys.get_key(call.c, call.path["key"]))


async def patch(call: Call) -> KeyAnswer:
    body: KeyPatch = call.body
    changed: dict[str, Any] = msgspec.structs.asdict(body)
    expires = changed.pop("expires_at")
    if expires is not UNSET:
        team = await teams.get_team(call.c, (await keys.get_key(call.c, call.path["key"])).team_id)
        changed["expires_at_ms"] = parse_instant(expires, "expires_at", team.timezone)
    return KeyAnswer.of(await keys.update_key(call.c, call.by, call.path["key"], KeyChange(**changed)))


async def delete(call: Call) -> KeyAnswer:
    return KeyAnswer.of(await keys.delete_key(call.c, call.by, call.path["key"]))


async def rotate(call: Call) -> NewKeyAnswer:
    body: Rotation = call.body
    new = await keys.rotate_key(call.c, call.by, _hasher(call), call.path["key"], overlap_s=body.overlap_s)
    return NewKeyAnswer.of(new)


ENDPOINTS = [
    Endpoint(
        "POST", "/keys", "Create a key; its secret is shown once", create, NewKeyAnswer, body=NewKeyBody, status=201
    ),
    Endpoint("GET", "/keys", "List keys", list_, Listing[KeyAnswer], EVERYONE, query=KeyFilter),
    Endpoint("GET", "/keys/{key}", "Get a key", get, KeyAnswer, EVERYONE),
    Endpoint("PATCH", "/keys/{key}", "Change, block or unblock a key", patch, KeyAnswer, body=KeyPatch),
    Endpoint("DELETE", "/keys/{key}", "Delete a key for good", delete, KeyAnswer),
    Endpoint(
        "POST",
        "/keys/{key}/rotate",
        "Give a key a new secret",
        rotate,
        NewKeyAnswer,
        body=Rotation,
        body_optional=True,
        status=201,
    ),
]
