"""The SQL database: one file (SQLite) or a server (PostgreSQL), behind the same few methods.

A write transaction is `async with db.begin() as c`, a read-only one `async with db.read() as c`. On SQLite a write
transaction starts as BEGIN IMMEDIATE, so it never fails half-way with "database is locked"; the file is in WAL mode,
synchronous=FULL, and may be shared by several processes of one host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction, create_async_engine

from ledger.errors import Invalid, LedgerUnavailable

Dialect = Literal["sqlite", "postgresql"]

BUSY_TIMEOUT_MS = 10_000
"""How long a SQLite writer waits for the writer before it; the same as the lock time-out on PostgreSQL."""
CONNECT_TIMEOUT_S = 5.0
_NO_DATABASE = ("file is not a database", "malformed")
_UNAVAILABLE = ("locked", "busy", "unable to open", "disk", "readonly", "closed", "connection", "full")
"""Words in driver messages that carry no SQLSTATE and mean: cannot be reached or written now."""


class CommitUnknown(LedgerUnavailable):
    """The connection broke while COMMIT was under way: it may or may not have happened. Read before trying again."""


class Database:
    """One pool of connections. Open it with `await Database.open(url)`, close it with `await db.close()`."""

    def __init__(self, engine: AsyncEngine, dialect: Dialect) -> None:
        self.engine = engine
        self.dialect: Dialect = dialect
        self._reader = engine.execution_options(read_only=True)
        self._one_writer = asyncio.Lock()

    @classmethod
    async def open(cls, url: str, *, pool_size: int = 5, command_timeout_s: float | None = None) -> Database:
        """Connects once to be sure. Raises Invalid for a URL of no known kind or a file that is no database,
        LedgerUnavailable if nobody answers.

        command_timeout_s: how long PostgreSQL may take for one statement before it counts as unavailable, so that a
        frozen server does not freeze us. Give one wherever somebody waits; None suits long reports.
        """
        parsed = async_url(url)
        dialect: Dialect = "sqlite" if parsed.drivername.startswith("sqlite") else "postgresql"
        if dialect == "sqlite":
            engine = _sqlite_engine(parsed, pool_size)
        else:
            engine = _postgresql_engine(parsed, pool_size, command_timeout_s)
        db = cls(engine, dialect)
        try:
            async with db.read() as c:
                if dialect == "sqlite":
                    await c.exec_driver_sql("SELECT count(*) FROM sqlite_master")  # reads the file's first page
        except BaseException as error:
            await db.close()
            if isinstance(error, DBAPIError) and any(word in str(error.orig) for word in _NO_DATABASE):
                raise Invalid(
                    f"{parsed.database} is damaged or no SQLite database ({error.orig}): restore it from a backup",
                    "storage.database",
                ) from None
            refusal = _refused_connection(error)
            if refusal is not None:
                raise Invalid(f"the database refuses the connection: {refusal}", "storage.database") from None
            raise
        return db

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A write transaction: committed at the end of the block, rolled back when the block raises.

        Raises LedgerUnavailable when the database cannot be reached or is not free in time, CommitUnknown when the
        connection broke during COMMIT. What else the database refuses (a constraint) stays a SQLAlchemy error.
        """
        if self.dialect == "sqlite":  # in one process wait in order, instead of polling the file lock in threads
            await self._wait_for_writer()
        try:
            async with self._transaction(self.engine) as c:
                yield c
        finally:
            if self.dialect == "sqlite":
                self._one_writer.release()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A read-only transaction. On SQLite all statements in it see one snapshot and never wait for a writer."""
        async with self._transaction(self._reader) as c:
            yield c

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """A read-only transaction in which all statements see the same moment."""
        async with self.read() as c:
            if self.dialect == "postgresql":
                await c.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            yield c

    async def close(self) -> None:
        await self.engine.dispose()

    async def _wait_for_writer(self) -> None:
        try:
            async with asyncio.timeout(BUSY_TIMEOUT_MS / 1000):
                await self._one_writer.acquire()
        except TimeoutError:
            raise LedgerUnavailable("the database is busy: another write transaction did not end in time") from None

    @asynccontextmanager
    async def _transaction(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        try:
            async with engine.connect() as c:
                transaction = await c.begin()
                try:
                    yield c
                except BaseException as error:
                    await self._abandon(c, transaction, error)
                    raise
                try:
                    await transaction.commit()
                except (DBAPIError, OSError) as error:
                    await self._abandon(c, transaction, error)
                    if is_connection_failure(error) and engine is self.engine:
                        raise CommitUnknown(_one_line("the database went away during COMMIT", error)) from error
                    raise
        except LedgerUnavailable:
            raise
        except (DBAPIError, PoolTimeout, OSError) as error:
            if is_connection_failure(error):
                raise LedgerUnavailable(_one_line("the database is not available", error)) from error
            raise

    async def _abandon(self, c: AsyncConnection, transaction: AsyncTransaction, error: BaseException) -> None:
        """Rolls back. Where a statement of PostgreSQL was cut short the connection is dropped instead, because a server
        that is frozen would let us wait for its answer to ROLLBACK."""
        with suppress(DBAPIError, OSError):
            if self.dialect == "postgresql" and isinstance(error, (asyncio.CancelledError, TimeoutError)):
                await c.invalidate()
            else:
                await transaction.rollback()


async def driver(c: AsyncConnection) -> Any:
    """The raw driver connection under `c` (asyncpg.Connection or aiosqlite.Connection): for bulk work inside it."""
    return (await c.get_raw_connection()).driver_connection


def is_connection_failure(error: BaseException) -> bool:
    """Whether nobody answered (or not in time), as opposed to the database answering no. Trying again can help."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, (PoolTimeout, OSError, TimeoutError))
    if error.connection_invalidated:
        return True
    sqlstate = getattr(error.orig, "sqlstate", None)
    if (
        sqlstate
    ):  # 08 connection · 53 no resources · 57P shutting down · 55P03 lock not free in time · 40 deadlock victim
        return str(sqlstate).startswith(("08", "53", "57P", "55P03", "40"))
    return isinstance(error, (OperationalError, InterfaceError)) and any(w in str(error.orig) for w in _UNAVAILABLE)


def _refused_connection(error: BaseException) -> str | None:
    """What PostgreSQL says to a wrong user, password or database name, where waiting does not help; else None."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    sqlstate = str(getattr(cause, "sqlstate", None) or "")
    return " ".join(str(cause).split())[:200] if sqlstate.startswith(("28", "3D")) else None


def async_url(url: str) -> URL:
    """`sqlite:///path` or `postgresql://user:pw@host/db` with our drivers in it. Raises Invalid for anything else."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise Invalid(f"not a database URL: {error}", "database") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise Invalid("SQLite needs a file, like sqlite:///data/tallygate.db", "database")
        return parsed.set(drivername="sqlite+aiosqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+asyncpg")
    raise Invalid(
        f"unknown kind of database {backend!r}: use sqlite:///FILE or postgresql://user:pw@host/db", "database"
    )


def _sqlite_engine(url: URL, pool_size: int) -> AsyncEngine:
    directory = Path(str(url.database)).expanduser().parent
    if not directory.is_dir():
        raise LedgerUnavailable(f"the directory of the database does not exist: {directory}; create it first")
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        hide_parameters=True,  # errors are logged: kept answers, end users and key hashes are not
        connect_args={"timeout": BUSY_TIMEOUT_MS / 1000},
    )
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    for pragma in (
        f"busy_timeout={BUSY_TIMEOUT_MS}",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "cache_size=-16000",
        "journal_size_limit=67108864",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:
    read_only = connection.get_execution_options().get("read_only")
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _postgresql_engine(url: URL, pool_size: int, command_timeout_s: float | None) -> AsyncEngine:
    settings = {
        "application_name": "tallygate",
        "lock_timeout": str(BUSY_TIMEOUT_MS),
        "idle_in_transaction_session_timeout": "60000",
        "synchronous_commit": "on",
        "jit": "off",
        "timezone": "UTC",
    }
    return create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        hide_parameters=True,  # as above
        pool_pre_ping=True,
        pool_timeout=BUSY_TIMEOUT_MS / 1000,
        connect_args={
            "timeout": min(CONNECT_TIMEOUT_S, command_timeout_s or CONNECT_TIMEOUT_S),
            "command_timeout": command_timeout_s,
            "server_settings": settings,
        },
    )


def _one_line(what: str, error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = " ".join(str(cause).split()) or type(cause).__name__
    return f"{what}: {text[:200]}"
