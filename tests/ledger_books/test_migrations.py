from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from ledger.database import Database
from ledger.migrations import REVISIONS, VERSIONS_DIR, NotMigrated, migrate, migrate_database, require_current
from ledger.schema import metadata


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
    else:
        yield request.getfixturevalue("postgres_url")


@pytest.fixture
async def db(ledger_url: str) -> AsyncIterator[Database]:
    """A migrated database of the test's own: it may be damaged."""
    database = await Database.open(ledger_url)
    yield database
    await database.close()


@pytest.fixture
async def empty(empty_url: str) -> AsyncIterator[Database]:
    database = await Database.open(empty_url)
    yield database
    await database.close()


async def test_migrations_build_exactly_the_schema(db: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        def ours(object_: object, name: str | None, type_: str, reflected: bool, _other: object) -> bool:
            return not (reflected and (type_ == "table" or name == "ix_usage_created_ms_brin"))

        context = MigrationContext.configure(connection, opts={"include_object": ours, "compare_type": False})
        return list(compare_metadata(context, metadata))

    async with db.read() as c:
        assert await c.run_sync(differences) == []


def test_the_listed_revisions_are_those_of_the_scripts() -> None:
    script = ScriptDirectory(str(VERSIONS_DIR.parent), version_locations=[str(VERSIONS_DIR)])
    assert [revision.revision for revision in reversed(list(script.walk_revisions()))] == list(REVISIONS)


async def test_migrating_twice_changes_nothing(db: Database, ledger_url: str) -> None:
    assert await migrate(ledger_url) == REVISIONS[-1]
    await require_current(db)


async def test_an_empty_database_is_refused_with_the_command_to_run(empty: Database) -> None:
    with pytest.raises(NotMigrated, match="tallygate migrate"):
        await require_current(empty)


async def test_an_older_database_is_refused_until_it_is_upgraded(empty: Database) -> None:
    await migrate_database(empty, REVISIONS[:1])
    with pytest.raises(NotMigrated, match=f"revision 0001, this release needs {REVISIONS[-1]}"):
        await require_current(empty)
    await migrate_database(empty)
    await require_current(empty)


async def test_a_newer_database_is_refused(db: Database) -> None:
    async with db.begin() as c:
        await c.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NotMigrated, match="9999, which this release does not know"):
        await require_current(db)
    with pytest.raises(NotMigrated, match="does not know"):
        await migrate_database(db)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DROP TABLE suspense", "half-migrated .table suspense is missing"),
        ("ALTER TABLE teams DROP COLUMN plan", "half-migrated .table teams lacks plan"),
        ("DELETE FROM alembic_version", "half-migrated .it has tables of ours but no revision"),
        ("DROP TABLE alembic_version", "half-migrated .it has tables of ours but no revision"),
        ("INSERT INTO alembic_version VALUES ('0001')", "half-migrated .it claims several revisions"),
    ],
)
async def test_a_half_migrated_database_is_refused(db: Database, damage: str, message: str) -> None:
    async with db.begin() as c:
        await c.execute(text(damage))
    with pytest.raises(NotMigrated, match=message):
        await require_current(db)
    with pytest.raises(NotMigrated, match=message):
        await migrate_database(db)


async def test_a_database_restored_without_its_constraints_or_triggers_is_refused(ledger_postgres_url: str) -> None:
    db = await Database.open(ledger_postgres_url)
    async with db.begin() as c:
        await c.execute(text("DROP TRIGGER audit_append_only ON audit"))
    with pytest.raises(NotMigrated, match="audit could be changed"):
        await require_current(db)
    async with db.begin() as c:
        await c.execute(text("ALTER TABLE accounts DROP CONSTRAINT ck_accounts_never_overspent"))
    with pytest.raises(NotMigrated, match="accounts lacks the constraint ck_accounts_never_overspent"):
        await require_current(db)
    await db.close()


async def test_a_failing_step_leaves_the_database_as_it_was(empty: Database, tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    versions.mkdir()
    for path in VERSIONS_DIR.glob("0*.py"):
        (versions / path.name).write_text(path.read_text())
    broken = f'from alembic import op\nrevision, down_revision = "9998", "{REVISIONS[-1]}"\ndef upgrade():\n'
    broken += '    op.execute("CREATE TABLE half (a INTEGER)")\n    op.execute("SELECT * FROM nowhere")\n'
    (versions / "9998_broken.py").write_text(broken)
    await migrate_database(empty)
    with pytest.raises(Exception, match="nowhere"):
        await migrate_database(empty, (*REVISIONS, "9998"), versions)
    await require_current(empty)
    async with empty.read() as c:
        with pytest.raises(Exception, match="half"):
            await c.execute(text("SELECT * FROM half"))
