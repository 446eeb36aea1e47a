"""Weights set at run time, followed over the change feed: every worker routes by them within a second."""

from __future__ import annotations

from collections.abc import Mapping

from ledger.audit import changes_since, latest_seq
from ledger.database import Database
from ledger.routes import SUBJECT, RouteWeights, list_weights
from proxy.routing import Route


class RouteFeed:
    """Keeps `Route.set_weights` as the ledger has them."""

    def __init__(self, db: Database, routes: Mapping[str, Route]) -> None:
        self._db = db
        self._routes = routes
        self._seq: int | None = None

    async def refresh(self) -> None:
        """Raises LedgerUnavailable; what is known stays in force."""
        async with self._db.read() as c:
            if self._seq is None:
                seq = await latest_seq(c)
                changed = True
            else:
                seq, changed = self._seq, False
                while changes := await changes_since(c, seq):
                    seq = changes[-1].seq
                    changed = changed or any(change.subject_kind == SUBJECT for change in changes)
            if changed:
                apply_weights(self._routes, await list_weights(c))
            self._seq = seq


def apply_weights(routes: Mapping[str, Route], found: list[RouteWeights]) -> None:
    """Put these in force and no others. What names no deployment that a route still has is as if it were not set."""
    for name, route in routes.items():
        here = {
            item.team_id: tuple(item.weights.get(deployment.name, 0) for deployment in route.deployments)
            for item in found
            if item.model == name
        }
        route.set_weights.clear()
        route.set_weights.update({team_id: weights for team_id, weights in here.items() if any(weights)})
