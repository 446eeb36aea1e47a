"""What all hosts of one installation must agree on, by name: the first to say it decides."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.schema import installation

KEY_SECRET = "key_secret_fingerprint"


async def agreed(c: AsyncConnection, name: str) -> str | None:
    """What was agreed; None when nobody has said anything yet."""
    query = select(installation.c.value).where(installation.c.name == name)
    found: str | None = (await c.execute(query)).scalar_one_or_none()
    return found


async def agree(c: AsyncConnection, name: str, value: str) -> str:
    """Say `value` unless another was said before; returns what is agreed now."""
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    await c.execute(build(installation).values(name=name, value=value).on_conflict_do_nothing())
    said = await agreed(c, name)
    assert said is not None
    return said


async def change(c: AsyncConnection, name: str, value: str) -> None:
    """Agree on something else from now on."""
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    new = build(installation).values(name=name, value=value)
    await c.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": value}))
