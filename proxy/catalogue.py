"""What the deployments are and whether they are up: the models that /v1/models lists, and the weights behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from policies.access import Principal
from policies.drafts import allowed_drafts
from proxy.http1 import ConnectionLost
from proxy.routing import Deployment, Route
from proxy.upstream import Upstream, UpstreamFailed, read_all

CHECK_S = 2.0
TIMEOUT_S = 2.0


class _Weights(msgspec.Struct):
    weights: str | None = None
    drafts: dict[str, str] = {}


class _Model(msgspec.Struct):
    id: str
    tallygate: _Weights = msgspec.field(default_factory=_Weights)


class _Models(msgspec.Struct):
    data: list[_Model] = []


class Catalogue:
    """Asks the local backend how it is; takes the word of the routes for all others."""

    def __init__(self, routes: Mapping[str, Route], upstreams: Mapping[str, Upstream]) -> None:
        self._routes = routes
        self._others = {name: item for name, item in upstreams.items() if not item.is_backend}
        self._backend = next((item for item in upstreams.values() if item.is_backend), None)
        self._trouble: str | None = "not asked yet" if self._backend is not None else None
        self._weights: dict[str, _Weights] = {}

    async def keep_current(self) -> None:
        """Runs for ever."""
        while self._backend is not None:
            await self.check()
            await asyncio.sleep(CHECK_S if self._trouble is None else CHECK_S / 4)

    async def check(self) -> None:
        """Ask the backend for its health and its models."""
        assert self._backend is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                self._trouble = await self._ask(self._backend)
        except (UpstreamFailed, ConnectionLost, TimeoutError, msgspec.MsgspecError) as error:
            self._trouble = str(error) or "it does not answer"
        self._backend.up = self._trouble is None

    async def _ask(self, backend: Upstream) -> str | None:
        """What is wrong with it; None: nothing. A server without `/health` is judged by its `/models` alone."""
        health = await backend.get(b"/health", below_base=False)
        body = await read_all(health, 2**20)
        if health.status not in (200, 404):
            return f"HTTP {health.status}: {body[:200].decode(errors='replace')}"
        models = await backend.get(b"/models")
        listed = msgspec.json.decode(await read_all(models, 2**20), type=_Models)
        self._weights = {model.id: model.tallygate for model in listed.data}
        return None

    def degraded(self) -> list[str]:
        own = [] if self._trouble is None else [f"backend: {self._trouble}"]
        return own + [f"{name}: its health check fails" for name, item in self._others.items() if not item.up]

    def any_deployment_up(self) -> bool:
        return any(self._up(item) for route in self._routes.values() for item in (*route.deployments, *route.fallbacks))

    def model(self, name: str, principal: Principal) -> dict[str, Any] | None:
        """One model as this key may see it; None when it may not."""
        route = self._routes.get(name)
        if route is None or (principal.models is not None and name not in principal.models):
            return None
        drafts = allowed_drafts(route.settings.drafts, principal.drafts)
        behind = {item.name: self._behind(item, drafts) for item in (*route.deployments, *route.fallbacks)}
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tallygate",
            "tallygate": {
                "drafts": list(drafts),
                "default_draft": route.settings.default_draft if route.settings.default_draft in drafts else None,
                "speculative": route.settings.speculative,
                "deployments": behind,
            },
        }

    def models(self, principal: Principal) -> list[dict[str, Any]]:
        return [model for name in self._routes if (model := self.model(name, principal)) is not None]

    def _behind(self, deployment: Deployment, drafts: tuple[str, ...]) -> dict[str, Any]:
        """Which weights really answer. An upstream's are known by the name that it gives them."""
        if not deployment.upstream.is_backend:
            return {"weights": deployment.model, "drafts": {}}
        known = self._weights.get(deployment.model, _Weights())
        return {"weights": known.weights, "drafts": {name: known.drafts.get(name) for name in drafts}}

    def _up(self, deployment: Deployment) -> bool:
        return self._trouble is None if deployment.upstream.is_backend else deployment.upstream.up
