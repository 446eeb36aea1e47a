"""Which deployment serves a request: weights, sticky canaries, fall-backs, and a pause for those that fail.

Decisions are functions of the route, the sticky key and the clock; nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from ledger.money import PICO_PER_UNIT, TOKENS_PER_PRICE
from proxy.counting import counting_of
from proxy.settings import Model, Price, Settings
from proxy.settings_checks import BACKEND
from proxy.upstream import Kind, Patience, Retries, Upstream

Draft = str | Literal[False] | None
FAILURES_BEFORE_PAUSE = 3
FIRST_PAUSE_MS = 2_000
LONGEST_PAUSE_MS = 30_000
DOWN_MS = 1_000
"""When to ask again while the backend is known to be down or still loading."""


@dataclass(frozen=True, slots=True)
class ProviderPrice:
    """What a deployment costs us, in pico USD per token."""

    input: int
    cache_read: int
    output: int

    def cost(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> int:
        return (
            (prompt_tokens - cached_tokens) * self.input
            + cached_tokens * self.cache_read
            + generated_tokens * self.output
        )


@dataclass(slots=True)
class Fitness:
    """Whether a deployment may be asked. It rests after several failures in a row, longer each time it fails again."""

    failures: int = 0
    resting_until_ms: int = 0
    busy_until_ms: int = 0
    """It answered 429: others are preferred until then, but it may still be asked."""

    def rests(self, now_ms: int) -> bool:
        return now_ms < self.resting_until_ms

    def succeeded(self) -> None:
        if self.failures:
            self.failures = 0
            self.resting_until_ms = 0

    def failed(self, kind: Kind, now_ms: int, pause_ms: int | None = None, *, again: bool = False) -> None:
        """Count one failed request; the caller's own mistakes (`request`) say nothing about the deployment. again: the
        request tries it once more, and only its last try counts."""
        if kind == "request":
            return
        if kind == "busy":
            self.busy_until_ms = now_ms + (pause_ms if pause_ms is not None else 1_000)
            return
        if again:
            return
        self.failures += 1
        beyond = self.failures - FAILURES_BEFORE_PAUSE
        if beyond >= 0:
            self.resting_until_ms = now_ms + min(FIRST_PAUSE_MS << min(beyond, 10), LONGEST_PAUSE_MS)


@dataclass(frozen=True, slots=True)
class Deployment:
    """One place that serves a model. `name` is what responses, ledger rows and reports call it."""

    name: str
    upstream: Upstream
    model: str
    weight: int
    price: ProviderPrice | None = None
    draft: str | None = None
    """The draft that it always speculates with, where it has one of its own."""
    fitness: Fitness = field(default_factory=Fitness, compare=False)

    @property
    def speculates(self) -> bool:
        return self.upstream.is_backend

    def fit(self, now_ms: int) -> bool:
        return self.upstream.up and not self.fitness.rests(now_ms)


@dataclass(frozen=True, slots=True)
class Route:
    """All that is configured for one model name."""

    model: str
    settings: Model
    deployments: tuple[Deployment, ...]
    fallbacks: tuple[Deployment, ...]
    drafts: frozenset[str]
    set_weights: dict[str | None, tuple[int, ...]] = field(default_factory=dict, compare=False)
    """What was set at run time, for a team (or None: for all that have none of their own), beside `deployments`."""

    def weights(self, team_id: str | None = None) -> tuple[int, ...]:
        """Those in force for a team, in the order of `deployments`."""
        found = self.set_weights
        if found:
            weights = found.get(team_id) or found.get(None)
            if weights is not None:
                return weights
        return tuple(item.weight for item in self.deployments)

    def choose(self, sticky_key: str | None, team_id: str | None = None, draft: Draft = None) -> Deployment:
        """The deployment of a sticky key: the same on every host and after every restart, split by weight.

        draft: one that the client named, or False: it wants none. Counts where deployments have drafts of their own.
        """
        if len(self.deployments) == 1:
            return self.deployments[0]
        weights = self.weights(team_id)
        if draft is not None:
            weights = self._suited(weights, draft)
        point = random.random() if sticky_key is None else _fraction(f"{self.model}\0{sticky_key}")
        point *= sum(weights)
        for deployment, weight in zip(self.deployments, weights, strict=True):
            point -= weight
            if point < 0:
                return deployment
        return self.deployments[-1]

    def candidates(
        self, sticky_key: str | None, now_ms: int, team_id: str | None = None, draft: Draft = None
    ) -> list[Deployment]:
        """Who may be asked, in order: the chosen one, the fall-backs, the other deployments, and at last those without
        a share: an answer from there is better than none. Left out are those that rest or are known to be down; one
        that asked to be left alone comes after the others of its kind. Empty: nobody can answer now."""
        chosen = self.choose(sticky_key, team_id, draft)
        if len(self.deployments) == 1 and not self.fallbacks:
            return [chosen] if chosen.fit(now_ms) else []
        weights = self.weights(team_id)
        ordered = [chosen]
        weighted = (item for item, weight in zip(self.deployments, weights, strict=True) if weight)
        for other in (*self.fallbacks, *weighted):
            if other not in ordered:
                ordered.append(other)
        last = [item for item in self.deployments if item not in ordered]
        return [*_fit(ordered, now_ms), *_fit(last, now_ms)]

    def _suited(self, weights: tuple[int, ...], draft: str | Literal[False]) -> tuple[int, ...]:
        """The weights of those that have the draft (or none) alone; all, where no deployment has drafts of its own."""
        own = draft or None
        suited = [item.draft == own for item in self.deployments]
        if not any(suited) or all(suited):
            return weights
        kept = tuple(weight if suits else 0 for weight, suits in zip(weights, suited, strict=True))
        return kept if any(kept) else tuple(map(int, suited))

    def rest_ms(self, now_ms: int) -> int:
        """How long until the first of them may be asked again."""
        places = (*self.deployments, *self.fallbacks)
        return min(max(1, item.fitness.resting_until_ms - now_ms) if item.upstream.up else DOWN_MS for item in places)

    def sticky_key(self, team_id: str, key_id: str, end_user: str | None) -> str | None:
        """What the split sticks to; a request without an end user sticks to its key."""
        match self.settings.sticky_by:
            case "team":
                return team_id
            case "key":
                return key_id
            case "user":
                return f"{team_id}\0{end_user}" if end_user else key_id
            case _:
                return None


def build_upstreams(settings: Settings) -> dict[str, Upstream]:
    """One client for each configured place, the local backend included. Raises Invalid for a tokenizer that is none."""
    upstreams = {
        name: Upstream(
            name,
            item.base_url,
            item.api_key,
            Patience(item.connect_timeout_s, item.first_byte_timeout_s, item.idle_timeout_s, item.read_timeout_s),
            max_concurrency=item.max_concurrency,
            native=frozenset(item.native),
            counting=counting_of(item.tokenizer),
            retries=Retries(item.retries, frozenset(item.retry_on)),
        )
        for name, item in settings.upstreams.items()
    }
    if settings.backend is not None:
        upstreams[BACKEND] = Upstream(
            BACKEND,
            settings.backend.base_url,
            None,
            Patience(),
            max_concurrency=settings.backend.max_batch,
            is_backend=True,
        )
    return upstreams


def build_routes(settings: Settings, upstreams: dict[str, Upstream]) -> dict[str, Route]:
    """Model name → route. Deployments are named after their place, with the model there when a place serves two."""
    return {name: _route(name, model, settings, upstreams) for name, model in settings.models.items()}


def deployment_names(name: str, model: Model) -> list[str]:
    """What the deployments of a model are called, in order."""
    places = [item.to for item in model.deployments]
    return [item.to if places.count(item.to) == 1 else f"{item.to}/{item.model or name}" for item in model.deployments]


def _route(name: str, model: Model, settings: Settings, upstreams: dict[str, Upstream]) -> Route:
    names = deployment_names(name, model)
    deployments = tuple(
        Deployment(
            names[index],
            upstreams[item.to],
            item.model or name,
            item.weight,
            _provider_price(item.cost, settings),
            item.draft,
        )
        for index, item in enumerate(model.deployments)
    )
    by_place = {item.upstream.name: item for item in reversed(deployments)}
    fallbacks = tuple(by_place.get(place) or Deployment(place, upstreams[place], name, 0) for place in model.fallback)
    return Route(name, model, deployments, fallbacks, frozenset(model.drafts))


def _provider_price(price: Price | None, settings: Settings) -> ProviderPrice | None:
    if price is None:
        return None
    rate = Fraction(1) if price.currency == "USD" else 1 / Fraction(settings.fx.USD_CNY)

    def pico(text: str) -> int:
        return round(Fraction(text) * rate * PICO_PER_UNIT / TOKENS_PER_PRICE)

    return ProviderPrice(pico(price.input), pico(price.cache_read or price.input), pico(price.output))


def _fit(places: list[Deployment], now_ms: int) -> list[Deployment]:
    """Those that can answer, in their order; one that is busy after the others."""
    fit = [item for item in places if item.fit(now_ms)]
    return sorted(fit, key=lambda item: item.fitness.busy_until_ms > now_ms)


def _fraction(text: str) -> float:
    """A fixed point in [0, 1) for each text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
