"""Two or more deployments of a model side by side, from the usage rows: what a canary is judged by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.partitions import uuid7_floor
from ledger.schema import usage
from ledger.sums import exact_sum, read_sum


class DeploymentFigures(msgspec.Struct, frozen=True):
    """What one deployment did. Times are milliseconds from admission to the answer's end, of completed requests."""

    deployment: str
    requests: int
    completed: int
    p50_ms: int | None
    p99_ms: int | None
    ttft_p50_ms: int | None
    ttft_p99_ms: int | None
    prompt_tokens: int
    generated_tokens: int
    billed_tokens: int
    draft_tokens: int
    accepted_tokens: int
    cost_usd_pico: int
    cost_cny_pico: int
    provider_cost_usd_pico: int
    completed_tokens: int
    latency_ms: int
    """Of all completed requests together."""
    draft_model: str | None = None
    """Only where drafts are told apart."""

    @property
    def tokens_per_s(self) -> float | None:
        """How fast completed requests generated, one by one."""
        return 1000 * self.completed_tokens / self.latency_ms if self.latency_ms else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


async def compare_deployments(
    c: AsyncConnection,
    model: str,
    *,
    team_id: str | None = None,
    from_ms: int | None = None,
    to_ms: int | None = None,
    by_draft: bool = False,
) -> list[DeploymentFigures]:
    """The deployments that served `model`, admitted in [from_ms, to_ms), sorted by name; percentiles are exact.

    by_draft: each deployment and draft apart.
    """
    where = [usage.c.model == model]
    if team_id is not None:
        where.append(usage.c.team_id == team_id)
    if from_ms is not None:
        where += [usage.c.created_ms >= from_ms, usage.c.request_id >= uuid7_floor(from_ms)]  # the second has an index
    if to_ms is not None:
        where.append(usage.c.created_ms < to_ms)
    counted = ("prompt_tokens", "generated_tokens", "billed_tokens", "draft_tokens", "accepted_tokens")
    amounts = ("cost_usd_pico", "cost_cny_pico", "provider_cost_usd_pico")
    columns = [func.sum(usage.c[name]).label(name) for name in counted]
    for name in amounts:
        columns += exact_sum(usage.c[name])
    completed = func.sum(case((usage.c.status == "completed", 1), else_=0)).label("completed")
    spent = func.sum(case((usage.c.status == "completed", usage.c.latency_ms), else_=0)).label("latency_ms")
    made = func.sum(case((usage.c.status == "completed", usage.c.generated_tokens), else_=0)).label("completed_tokens")
    places = [usage.c.deployment, *([usage.c.draft_model] if by_draft else [])]
    query = select(*places, func.count().label("requests"), completed, spent, made, *columns)
    rows = (await c.execute(query.where(*where).group_by(*places).order_by(*places))).mappings()
    found = []
    for row in rows.all():
        here = [*where, *(place == row[place.name] for place in places), usage.c.status == "completed"]
        latencies = await _histogram(c, usage.c.latency_ms, here)
        first_tokens = await _histogram(c, usage.c.ttft_ms, [*here, usage.c.ttft_ms.is_not(None)])
        figures = DeploymentFigures(
            deployment=row["deployment"],
            requests=int(row["requests"]),
            completed=int(row["completed"]),
            p50_ms=percentile(latencies, 50),
            p99_ms=percentile(latencies, 99),
            ttft_p50_ms=percentile(first_tokens, 50),
            ttft_p99_ms=percentile(first_tokens, 99),
            latency_ms=int(row["latency_ms"]),
            completed_tokens=int(row["completed_tokens"]),
            draft_model=row["draft_model"] if by_draft else None,
            **{name: int(row[name]) for name in counted},
            **{name: read_sum(row, name) for name in amounts},
        )
        found.append(figures)
    return found


async def _histogram(c: AsyncConnection, column: object, where: Sequence[object]) -> list[tuple[int, int]]:
    """(value, how often), ascending: as many rows as there are different values, not requests."""
    query = select(column, func.count()).where(*where).group_by(column).order_by(column)  # type: ignore[call-overload]
    return [(int(value), int(count)) for value, count in await c.execute(query)]


def percentile(histogram: Sequence[tuple[int, int]], percent: int) -> int | None:
    """The smallest value that at least `percent` % of all are not above (nearest rank); None of nothing."""
    total = sum(count for _, count in histogram)
    rank = -(-total * percent // 100)
    seen = 0
    for value, count in histogram:
        seen += count
        if seen >= rank:
            return value
    return None
