"""Bringing a database to the schema of this release, and refusing to work with any other.

All steps of an upgrade run in one transaction on both databases: it happens wholly or not at all, and of two processes
that start at once one does it. Alembic is imported only when there is something to migrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.errors import LedgerError
from ledger.schema import metadata

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
"""All revisions in order, oldest first; the last one is what this release works with."""
APPEND_ONLY = ("audit", "fx_rates", "price_versions", "price_items")
"""Tables whose rows triggers keep from being changed or deleted."""
VERSIONS_DIR = Path(__file__).parent / "versions"
_LOCK = 0x7A11_6A7E  # advisory lock of PostgreSQL: one migration at a time


class NotMigrated(LedgerError):
    """The database does not have the schema of this release. The message says what to do."""


async def migrate(url: str) -> str:
    """Creates or upgrades the schema; returns the revision. A current database is left alone.

    Raises NotMigrated when the database is not in a state that a release of ours made.
    """
    db = await Database.open(url, pool_size=1)
    try:
        return await migrate_database(db)
    finally:
        await db.close()


async def migrate_database(db: Database, revisions: Sequence[str] = REVISIONS, versions: Path = VERSIONS_DIR) -> str:
    """As `migrate`, on an open database, up to the last of `revisions`."""
    async with db.begin() as c:
        if db.dialect == "postgresql":
            await c.execute(text("SET LOCAL lock_timeout = '60s'"))
            await c.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        found = await _columns(c)
        if "alembic_version" not in found and metadata.tables.keys() & found.keys():
            raise NotMigrated(_half_migrated("it has tables of ours but no revision"))
        if await _revision(c, found) != revisions[-1]:
            await _check_known(c, found, revisions)
            await c.run_sync(_upgrade, revisions[-1], versions)
        if tuple(revisions) == REVISIONS:
            _check_complete(await _columns(c), await _rules(c))
    return revisions[-1]


async def require_current(db: Database) -> None:
    """Raises NotMigrated unless the schema is that of this release, to the last column, constraint and trigger."""
    async with db.read() as c:
        found = await _columns(c)
        if not metadata.tables.keys() & found.keys():
            raise NotMigrated("the database is empty: run `tallygate migrate` (`tallygate serve` does it by itself)")
        revision = await _revision(c, found)
        if revision is None:
            raise NotMigrated(_half_migrated("it has tables of ours but no revision"))
        await _check_known(c, found, REVISIONS)
        if revision != REVISIONS[-1]:
            raise NotMigrated(
                f"the database is at revision {revision}, this release needs {REVISIONS[-1]}: back it up, then run "
                "`tallygate migrate`"
            )
        _check_complete(found, await _rules(c))


def _upgrade(connection: Connection, revision: str, versions: Path) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    script = ScriptDirectory(str(versions.parent), version_locations=[str(versions)])

    def steps(current: object, _context: object) -> object:
        return script._upgrade_revs(revision, current)  # type: ignore[arg-type]  # what alembic's own command does

    with EnvironmentContext(Config(), script, fn=steps, destination_rev=revision) as environment:
        environment.configure(connection=connection, transactional_ddl=True)
        environment.run_migrations()


async def _columns(c: AsyncConnection) -> dict[str, set[str]]:
    """Table name → column names, of the tables that are there."""
    if c.dialect.name == "sqlite":
        query = "SELECT m.name, i.name FROM sqlite_master m JOIN pragma_table_info(m.name) i WHERE m.type = 'table'"
    else:
        query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    found: dict[str, set[str]] = {}
    for table, column in await c.execute(text(query)):
        found.setdefault(table, set()).add(column)
    return found


async def _revision(c: AsyncConnection, found: dict[str, set[str]]) -> str | None:
    if "alembic_version" not in found:
        return None
    revisions = (await c.execute(text("SELECT version_num FROM alembic_version"))).scalars().all()
    if len(revisions) > 1:
        raise NotMigrated(_half_migrated(f"it claims several revisions at once: {', '.join(sorted(revisions))}"))
    return str(revisions[0]) if revisions else None


async def _check_known(c: AsyncConnection, found: dict[str, set[str]], revisions: Sequence[str]) -> None:
    revision = await _revision(c, found)
    if revision is None and metadata.tables.keys() & found.keys():
        raise NotMigrated(_half_migrated("it has tables of ours but no revision"))
    if revision is not None and revision not in revisions:
        raise NotMigrated(
            f"the database is at revision {revision}, which this release does not know (it knows up to "
            f"{revisions[-1]}): use the newer release that made it"
        )


async def _rules(c: AsyncConnection) -> str:
    """The names of the constraints and triggers that are there, each followed by a space."""
    if c.dialect.name == "sqlite":
        query = "SELECT replace(sql, char(10), ' ') FROM sqlite_master WHERE sql IS NOT NULL"
    else:
        here = "n.oid = c.connamespace AND n.nspname = current_schema()"
        query = (
            f"SELECT conname FROM pg_constraint c JOIN pg_namespace n ON {here} UNION ALL "
            "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal"
        )
    return " ".join((await c.execute(text(query))).scalars()) + " "


def _check_complete(found: dict[str, set[str]], rules: str) -> None:
    for name, table in metadata.tables.items():
        missing = {column.name for column in table.columns} - found.get(name, set())
        if name not in found:
            raise NotMigrated(_half_migrated(f"table {name} is missing"))
        if missing:
            raise NotMigrated(_half_migrated(f"table {name} lacks {', '.join(sorted(missing))}"))
        for constraint in table.constraints:
            if f"{constraint.name} " not in rules:
                raise NotMigrated(_half_migrated(f"table {name} lacks the constraint {constraint.name}"))
    for name in APPEND_ONLY:
        if f"{name}_append_only" not in rules:
            raise NotMigrated(_half_migrated(f"table {name} could be changed: its trigger is missing"))


def _half_migrated(what: str) -> str:
    return f"the database is half-migrated ({what}): restore the backup made before the upgrade, then upgrade again"
