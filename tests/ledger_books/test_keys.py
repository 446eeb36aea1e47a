from __future__ import annotations

import pytest
from sqlalchemy import text

from ledger.admin_tokens import create_admin_token, find_admin_token, list_admin_tokens, revoke_admin_token
from ledger.audit import By, changes_since, latest_seq
from ledger.database import Database
from ledger.errors import Conflict, Invalid, NotFound
from ledger.keys import (
    KeyChange,
    KeyHasher,
    NewKey,
    block_key,
    create_key,
    delete_key,
    find_by_hash,
    get_key,
    list_keys,
    rotate_key,
    update_key,
)
from ledger.teams import create_team
from tests.ledger_books.conftest import NOW_MS

HASHER = KeyHasher(b"a secret of the server")


@pytest.fixture
async def key(db: Database, by: By) -> NewKey:
    async with db.begin() as c:
        await create_team(c, by, "Acme", billing_currency="CNY", team_id="acme")
        return await create_key(c, by, HASHER, "acme", name="ci", models=["m"], allowed_ips=["10.0.0.0/8"])


async def test_a_key_is_found_by_its_hash_with_all_that_authentication_needs(db: Database, key: NewKey) -> None:
    async with db.read() as c:
        record = await find_by_hash(c, HASHER(key.secret))
        assert await find_by_hash(c, HASHER("sk-tg-other")) is None
    assert record is not None
    assert (record.key_id, record.key_name, record.team_id, record.team_name) == (key.key.id, "ci", "acme", "Acme")
    assert (record.billing_currency, record.timezone, record.state) == ("CNY", "Asia/Shanghai", "active")
    assert (record.models, record.drafts, record.allowed_ips) == (("m",), None, ("10.0.0.0/8",))
    assert record.expires_at_ms is None


async def test_the_database_and_the_audit_never_hold_the_secret(db: Database, key: NewKey, by: By) -> None:
    async with db.begin() as c:
        rotated = await rotate_key(c, by, HASHER, key.key.id)
        token = await create_admin_token(c, by, HASHER, "ops", "admin")
        for table in ("keys", "key_secrets", "audit", "admin_tokens"):
            dump = str((await c.execute(text(f"SELECT * FROM {table}"))).all())
            for secret in (key.secret, rotated.secret, token.secret):
                assert secret not in dump
                assert secret[-20:] not in dump
    assert key.secret.startswith("sk-tg-")
    assert key.secret.startswith(key.key.prefix)
    assert len(key.secret) == 49


async def test_rotation_lets_the_old_secret_live_for_the_overlap(db: Database, key: NewKey, by: By) -> None:
    async with db.begin() as c:
        new = await rotate_key(c, by, HASHER, key.key.id, overlap_s=60)
        old = await find_by_hash(c, HASHER(key.secret))
        fresh = await find_by_hash(c, HASHER(new.secret))
        assert old is not None
        assert fresh is not None
        assert (old.key_id, old.expires_at_ms) == (key.key.id, NOW_MS + 60_000)
        assert (fresh.key_id, fresh.expires_at_ms) == (key.key.id, None)
        await rotate_key(c, by, HASHER, key.key.id)
        cut = await find_by_hash(c, HASHER(key.secret))
        assert cut is not None
        assert cut.expires_at_ms == NOW_MS
        await rotate_key(c, by, HASHER, key.key.id, overlap_s=3600)
        still = await find_by_hash(c, HASHER(key.secret))
        assert still is not None
        assert still.expires_at_ms == NOW_MS


async def test_a_key_that_expires_before_the_overlap_ends_expires(db: Database, key: NewKey, by: By) -> None:
    async with db.begin() as c:
        await update_key(c, by, key.key.id, KeyChange(expires_at_ms=NOW_MS + 5))
        await rotate_key(c, by, HASHER, key.key.id, overlap_s=60)
        old = await find_by_hash(c, HASHER(key.secret))
    assert old is not None
    assert old.expires_at_ms == NOW_MS + 5


async def test_block_unblock_and_delete_are_seen_in_the_record_and_in_the_change_feed(
    db: Database, key: NewKey, by: By
) -> None:
    async with db.read() as c:
        before = await latest_seq(c)
    states = []
    for act in (
        lambda c: block_key(c, by, key.key.id),
        lambda c: block_key(c, by, key.key.id, blocked=False),
        lambda c: delete_key(c, by, key.key.id),
    ):
        async with db.begin() as c:
            await act(c)
            record = await find_by_hash(c, HASHER(key.secret))
            assert record is not None
            states.append(record.state)
    assert states == ["blocked", "active", "deleted"]
    async with db.begin() as c:
        changes = await changes_since(c, before)
        assert [(change.subject_kind, change.subject_id, change.team_id) for change in changes] == [
            ("key", key.key.id, "acme")
        ] * 3
        for gone in (block_key(c, by, key.key.id), rotate_key(c, by, HASHER, key.key.id)):
            with pytest.raises(NotFound):
                await gone
        assert (await get_key(c, key.key.id)).state == "deleted"
        assert (await list_keys(c, "acme")).items == []


async def test_a_change_touches_only_what_it_names_and_nothing_twice(db: Database, key: NewKey, by: By) -> None:
    async with db.begin() as c:
        change = KeyChange(drafts=("ngram",), models=None, end_user_required=True)
        changed = await update_key(c, by, key.key.id, change)
        assert (changed.name, changed.models, changed.drafts) == ("ci", None, ("ngram",))
        assert changed == await get_key(c, key.key.id)
        seq = await latest_seq(c)
        assert await update_key(c, by, key.key.id, change) == changed
        assert await latest_seq(c) == seq


async def test_a_key_needs_a_known_team_and_real_addresses(db: Database, key: NewKey, by: By) -> None:
    async with db.begin() as c:
        with pytest.raises(NotFound, match="nobody"):
            await create_key(c, by, HASHER, "nobody")
        with pytest.raises(Invalid, match="300"):
            await create_key(c, by, HASHER, "acme", allowed_ips=["300.1.1.1"])
        with pytest.raises(Conflict):
            await create_key(c, by, HASHER, "acme", secret=key.secret)


def test_hashes_depend_on_the_servers_secret_and_a_short_one_is_refused() -> None:
    assert HASHER("k") != KeyHasher(b"another secret of it")("k")
    assert HASHER("k") == HASHER("k")
    with pytest.raises(Invalid, match="16 bytes"):
        KeyHasher(b"short")


async def test_admin_tokens_have_a_role_until_they_are_revoked(db: Database, by: By) -> None:
    async with db.begin() as c:
        new = await create_admin_token(c, by, HASHER, "ops", "finance")
        found = await find_admin_token(c, HASHER(new.secret))
        assert found == new.token
        revoked = await revoke_admin_token(c, by, new.token.id)
        assert await revoke_admin_token(c, By("ada", NOW_MS + 9), new.token.id) == revoked
        assert await find_admin_token(c, HASHER(new.secret)) is None
        with pytest.raises(Invalid, match="admin, finance, viewer"):
            await create_admin_token(c, by, HASHER, "ops", "root")  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await revoke_admin_token(c, by, "nothing")
        assert (await list_admin_tokens(c)).items == [revoked]


async def test_the_configured_admin_token_is_stored_once(db: Database, by: By) -> None:
    async with db.begin() as c:
        first = await create_admin_token(c, by, HASHER, "configured", "admin", secret="from the environment")
        again = await create_admin_token(c, by, HASHER, "configured", "admin", secret="from the environment")
        assert again.token == first.token
        assert len((await list_admin_tokens(c)).items) == 1
