"""API keys: bearer token → Principal, from a cache that follows the change feed.

A warm key costs one HMAC and no SQL. A change of a key, its team or its quotas drops what is cached of it at the next
`refresh`; the gateway refreshes every 250 ms, so a revocation is seen by every worker within a second.
"""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import quotas as books
from ledger.audit import Change, changes_since, latest_seq
from ledger.database import Database
from ledger.keys import KeyHasher, KeyRecord, find_by_hash
from policies.access import Principal, parse_networks
from policies.quotas import Quota
from proxy.openai.errors import invalid_api_key

MAX_CACHED = 100_000
MAX_KEY_CHARS = 512
_KINDS = frozenset({"key", "team", "quotas"})


class Keyring:
    """All keys that were seen lately, known by their hash only."""

    def __init__(self, db: Database, hasher: KeyHasher) -> None:
        self._db = db
        self._hasher = hasher
        self._known: dict[str, Principal] = {}
        self._unknown: set[str] = set()
        self._seq: int | None = None

    async def principal(self, token: str | None) -> Principal:
        """Whose key this is, in whatever state. Raises ApiError 401, LedgerUnavailable (a new key, and no database)."""
        if not token:
            raise invalid_api_key("No API key was given: send it as `Authorization: Bearer sk-tg-…`.")
        secret_hash = self._hasher(token)
        principal = self._known.get(secret_hash)
        if principal is None:
            principal = await self._look_up(secret_hash, token)
        return principal

    async def refresh(self) -> None:
        """Follow the change feed. Raises LedgerUnavailable; what is cached stays in use."""
        async with self._db.read() as c:
            if self._seq is None:
                self._seq = await latest_seq(c)
                self._forget_all()
                return
            while changes := await changes_since(c, self._seq):
                self._seq = changes[-1].seq
                for change in changes:
                    self._forget(change)

    async def _look_up(self, secret_hash: str, token: str) -> Principal:
        if secret_hash in self._unknown or len(token) > MAX_KEY_CHARS:
            raise _wrong(token)
        seen = self._seq
        async with self._db.read() as c:
            record = await find_by_hash(c, secret_hash)
            principal = None if record is None else await _principal(c, record)
        current = seen is not None and seen == self._seq  # else a change came by while we read: do not keep it
        if principal is None:
            if current:
                if len(self._unknown) >= MAX_CACHED:
                    self._unknown.clear()
                self._unknown.add(secret_hash)
            raise _wrong(token)
        if current:
            if len(self._known) >= MAX_CACHED:
                self._known.clear()
            self._known[secret_hash] = principal
        return principal

    def _forget(self, change: Change) -> None:
        if change.subject_kind not in _KINDS:
            return
        if change.subject_kind == "key":
            self._unknown.clear()
        if change.team_id is None:
            self._forget_all()
            return
        self._known = {known: item for known, item in self._known.items() if item.team_id != change.team_id}

    def _forget_all(self) -> None:
        self._known.clear()
        self._unknown.clear()


def bearer(authorization: bytes | None) -> str | None:
    """The token of an Authorization header; None when there is none."""
    if authorization is None:
        return None
    scheme, _, token = authorization.decode("latin-1").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


async def _principal(c: AsyncConnection, record: KeyRecord) -> Principal:
    limits = await books.applicable(c, record.team_id, record.key_id)
    cursor = None
    while True:
        page = await books.list_quotas(c, team_id=record.team_id, cursor=cursor, limit=1_000)
        limits += [quota for quota in page.items if quota.scope == "end_user"]
        cursor = page.next_cursor
        if cursor is None:
            break
    return Principal(
        team_id=record.team_id,
        key_id=record.key_id,
        key_name=record.key_name,
        billing_currency=record.billing_currency,
        timezone=record.timezone,
        state=record.state,
        expires_at_ms=record.expires_at_ms,
        models=None if record.models is None else frozenset(record.models),
        drafts=None if record.drafts is None else frozenset(record.drafts),
        allowed_networks=parse_networks(record.allowed_ips or ()),
        end_user_required=record.end_user_required,
        quotas=tuple(_quota(quota) for quota in limits if quota.metric != "spend"),
    )


def _quota(quota: books.Quota) -> Quota:
    return Quota(
        quota.id, quota.scope, quota.metric, quota.window, quota.limit, quota.model, quota.hard, quota.end_user
    )


def _wrong(token: str) -> Exception:
    shown = f" ({token[:6]}…{token[-4:]})" if len(token) > 16 else ""
    return invalid_api_key(f"Incorrect API key provided{shown}: ask an administrator for one.")
