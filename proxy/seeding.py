"""What the first start puts into an empty ledger: prices, an admin token, a demo team with a key and a little money.

Every step may be repeated: a start that was interrupted is completed by the next one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import admin_tokens, installation, keys, publishing, teams, topups
from ledger.audit import By
from ledger.database import Database
from ledger.errors import LedgerUnavailable, NotFound
from ledger.keys import KeyHasher
from ledger.migrations import NotMigrated, migrate_database, require_current
from ledger.money import PICO_PER_UNIT, FxRate
from ledger.publishing import Quote
from proxy.charged import Prices, prices_in_force
from proxy.preflight import StartRefused
from proxy.secrets import fingerprint, has_key_secret, key_secret, read_or_create
from proxy.settings import Price, Settings

ACTOR = "first-start"
DEMO_TEAM = "team_demo"
DEMO_USD = 10


@dataclass(frozen=True)
class FirstRun:
    """What the start screen may show. `admin_token` only at the start that made it; `demo_key` while it works."""

    admin_token: str | None
    demo_key: str | None
    prices: Prices = field(default_factory=Prices)
    demo_timezone: str | None = None


async def prepare(settings: Settings) -> FirstRun:
    """Migrate and seed. Raises StartRefused, LedgerError."""
    db = await Database.open(settings.storage.database, pool_size=1)
    try:
        await _migrate(db)
        hasher = KeyHasher(await secret_of(settings, db))
        async with db.begin() as c:
            by = By(ACTOR, time.time_ns() // 1_000_000)
            await _seed_prices(c, by, settings)
            token = await _first_token(c, by, hasher, settings)
            demo_key = await _demo_key(c, by, hasher, settings)
            prices = await prices_in_force(c, settings, by.at_ms)
            return FirstRun(token, demo_key, prices, await _demo_timezone(c))
    finally:
        await db.close()


async def _seed_prices(c: AsyncConnection, by: By, settings: Settings) -> None:
    await publishing.seed(c, by, quotes(settings), FxRate.parse("USD", "CNY", settings.fx.USD_CNY))


def quotes(settings: Settings) -> list[Quote]:
    """The prices that the configuration gives, for the first price version."""
    return [quote(name, model.price) for name, model in settings.models.items() if model.price is not None]


def quote(model: str, price: Price) -> Quote:
    return Quote.parse(model, **{name: getattr(price, name) for name in price.__struct_fields__})


async def secret_of(settings: Settings, db: Database) -> bytes:
    """The secret that keys are hashed with, which is the same on all hosts of a database: its fingerprint is in there.

    Never a fresh one beside keys that were hashed with another, and never another one: no key would work. Raises
    StartRefused then.
    """
    async with db.read() as c:
        known = await installation.agreed(c, installation.KEY_SECRET)
        if not has_key_secret(settings) and (known is not None or await _has_hashes(c)):
            raise StartRefused(
                f"{settings.data_dir / 'key-secret'} is missing, and the keys in {_place(settings)} were hashed with "
                "it: restore it from the backup, or set server.key_secret to the secret that the other hosts use"
            )
    secret = key_secret(settings)
    mark = fingerprint(secret)
    if known is None:
        async with db.begin() as c:
            known = await installation.agree(c, installation.KEY_SECRET, mark)
    if known != mark:
        where = "server.key_secret" if settings.server.key_secret is not None else settings.data_dir / "key-secret"
        raise StartRefused(
            f"{where} is not the secret that the keys in {_place(settings)} are hashed with: use the one of the other "
            "hosts; to give up all keys and tokens made under that one, run `tallygate migrate --new-key-secret`"
        )
    return secret


async def _has_hashes(c: AsyncConnection) -> bool:
    return bool((await keys.list_keys(c, limit=1)).items or (await admin_tokens.list_admin_tokens(c, limit=1)).items)


async def change_secret(settings: Settings, db: Database) -> None:
    """From now on keys are hashed with this host's secret; those made under another no longer work."""
    async with db.begin() as c:
        await installation.change(c, installation.KEY_SECRET, fingerprint(key_secret(settings)))


async def bring_up_to_date(settings: Settings) -> None:
    """What a gateway without a supervisor needs: the tables, configured prices of models that have none, and the secret
    of the other hosts. Raises StartRefused, LedgerError."""
    db = await Database.open(settings.storage.database, pool_size=1)
    try:
        await _migrate(db)
        async with db.begin() as c:
            await _seed_prices(c, By(ACTOR, time.time_ns() // 1_000_000), settings)
        await secret_of(settings, db)
    finally:
        await db.close()


def check_startable_without_database(settings: Settings, error: LedgerUnavailable) -> None:
    """Raises StartRefused where waiting for the database is of no use: a file is here or it is not, and a host that has
    no secret cannot know whether it needs another's."""
    if settings.storage.database.startswith("sqlite:"):
        raise error
    if not has_key_secret(settings):
        raise StartRefused(f"{error}; without it nobody knows whether this host needs another's key-secret")


async def _migrate(db: Database) -> None:
    try:
        await require_current(db)
    except NotMigrated:
        await migrate_database(db)


def _place(settings: Settings) -> str:
    """The database without its password."""
    return settings.storage.database.rpartition("@")[2]


async def _first_token(c: AsyncConnection, by: By, hasher: KeyHasher, settings: Settings) -> str | None:
    if settings.admin_token is not None or (await admin_tokens.list_admin_tokens(c, limit=1)).items:
        return None
    return (await admin_tokens.create_admin_token(c, by, hasher, "first start", "admin")).secret


async def _demo_key(c: AsyncConnection, by: By, hasher: KeyHasher, settings: Settings) -> str | None:
    """The demo key's text, from its file; made with its team when the ledger has no team and only this host can ask."""
    path = settings.data_dir / "demo-key"
    if is_loopback(settings.server.host) and not (await teams.list_teams(c, limit=1)).items:
        await teams.create_team(c, by, "demo", team_id=DEMO_TEAM, timezone=settings.billing.timezone)
        await topups.top_up(c, by, DEMO_TEAM, DEMO_USD * PICO_PER_UNIT, currency="USD", reference="demo")
        secret = read_or_create(path, keys.new_secret)
        await keys.create_key(c, by, hasher, DEMO_TEAM, name="demo", secret=secret)
        return secret
    known = _read(path)
    record = None if known is None else await keys.find_by_hash(c, hasher(known))
    return known if record is not None and record.state == "active" else None


async def _demo_timezone(c: AsyncConnection) -> str | None:
    try:
        return (await teams.get_team(c, DEMO_TEAM)).timezone
    except NotFound:
        return None


def is_loopback(host: str) -> bool:
    """Whether a server that listens there can be reached from this host alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None
