"""What is known of deployments beside the usage they billed: attempts that failed, and how busy their devices were."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Table, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.schema import deployment_failures, deployment_samples

MINUTE_MS = 60_000
KEPT_MS = 90 * 86_400_000


async def add_failures(c: AsyncConnection, failures: Mapping[tuple[str, str], int], now_ms: int) -> None:
    """failures: (model, deployment) → how many attempts failed lately."""
    for (model, deployment), count in sorted(failures.items()):
        place = {"model": model, "deployment": deployment, "minute_ms": now_ms - now_ms % MINUTE_MS}
        await _add(c, deployment_failures, place, {"failures": count})


async def failures_of(
    c: AsyncConnection, model: str, from_ms: int | None = None, to_ms: int | None = None
) -> dict[str, int]:
    """Deployment → failed attempts, by whole minutes."""
    f = deployment_failures.c
    query = select(f.deployment, func.sum(f.failures)).where(f.model == model).group_by(f.deployment)
    if from_ms is not None:
        query = query.where(f.minute_ms >= from_ms - from_ms % MINUTE_MS)
    if to_ms is not None:
        query = query.where(f.minute_ms < to_ms)
    return {deployment: int(count) for deployment, count in await c.execute(query)}


async def add_sample(
    c: AsyncConnection, place: str, now_ms: int, *, draft_tokens: int, accepted_tokens: int, utilisation: float | None
) -> None:
    """One look at a place's own metrics. utilisation: 0 to 1, None where it tells none."""
    at = {"place": place, "minute_ms": now_ms - now_ms % MINUTE_MS}
    seen = 0 if utilisation is None else round(min(1.0, max(0.0, utilisation)) * 1000)
    samples = 0 if utilisation is None else 1
    counts = {"draft_tokens": draft_tokens, "accepted_tokens": accepted_tokens}
    await _add(c, deployment_samples, at, {**counts, "samples": samples, "utilisation_permille": seen})


async def utilisation_of(c: AsyncConnection, from_ms: int | None = None, to_ms: int | None = None) -> dict[str, float]:
    """Place → mean utilisation of its device, 0 to 1, where it told any."""
    s = deployment_samples.c
    query = select(s.place, func.sum(s.utilisation_permille), func.sum(s.samples)).group_by(s.place)
    if from_ms is not None:
        query = query.where(s.minute_ms >= from_ms - from_ms % MINUTE_MS)
    if to_ms is not None:
        query = query.where(s.minute_ms < to_ms)
    return {place: int(total) / int(count) / 1000 for place, total, count in await c.execute(query) if count}


async def prune(c: AsyncConnection, now_ms: int) -> None:
    """Forget what is older than 90 days."""
    for table in (deployment_failures, deployment_samples):
        await c.execute(delete(table).where(table.c.minute_ms < now_ms - KEPT_MS))


async def _add(c: AsyncConnection, table: Table, place: Mapping[str, object], counts: Mapping[str, int]) -> None:
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    grown = {name: table.c[name] + count for name, count in counts.items()}
    row = {**place, **counts}
    await c.execute(build(table).values(row).on_conflict_do_update(index_elements=list(place), set_=grown))
