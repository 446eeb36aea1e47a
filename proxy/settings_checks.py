"""What must hold between settings, beyond the type of each one. Each complaint names the key it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ledger.errors import Invalid
from ledger.money import FxRate, MoneyError, parse_price
from ledger.periods import zone
from policies.access import parse_networks

if TYPE_CHECKING:
    from proxy.settings import Model, Price, Settings

Complain = Callable[[str, str], None]

BACKEND = "backend"
"""The name by which deployments refer to the local engine."""


def check(settings: Settings, complain: Complain) -> None:
    """Cross-check; `complain(path, message)` is called once for each problem."""
    _check_storage(settings, complain)
    _check_places(settings, complain)
    for name, model in settings.models.items():
        _check_model(settings, name, model, complain)
    _check_billing(settings, complain)
    for index, hook in enumerate(settings.webhooks):
        _check_url(f"webhooks[{index}].url", hook.url, complain)
        if hook.url in [other.url for other in settings.webhooks[:index]]:
            complain(f"webhooks[{index}].url", "the same URL twice; one webhook takes all its events")


def _check_storage(settings: Settings, complain: Complain) -> None:
    storage = settings.storage
    if not storage.database.startswith(("sqlite:///", "postgresql://", "postgres://")):
        complain("storage.database", "must begin with sqlite:/// (a file) or postgresql:// (user:password@host/name)")
    elif storage.database == "sqlite:///":
        complain("storage.database", "names no file; write sqlite:///data/tallygate.db")
    if storage.counters != "memory":
        from policies.counters.resp import Address  # not for those who need none

        try:
            Address.parse(storage.counters)
        except ValueError:
            complain("storage.counters", "must be `memory` or a URL such as redis://host:6379/0 (rediss:// with TLS)")
    if storage.counters == "memory" and settings.server.workers > 1:
        complain(
            "server.workers",
            f"{settings.server.workers} workers cannot share counters that live in one process: "
            "set storage.counters to redis://… or workers to 1",
        )
    if settings.limits.on_outage == "refuse" and storage.counters == "memory":
        complain("limits.on_outage", "counters in memory are never away; `refuse` is for storage.counters: redis://…")
    for index, network in enumerate(settings.server.trusted_proxies):
        try:
            parse_networks([network])
        except ValueError:
            complain(
                f"server.trusted_proxies[{index}]",
                f"must be an address or a network such as 10.0.0.0/8, got {network!r}",
            )
    if settings.server.key_secret is not None and len(settings.server.key_secret) < 16:
        complain("server.key_secret", "must have at least 16 characters")


def _check_places(settings: Settings, complain: Complain) -> None:
    for name, upstream in settings.upstreams.items():
        if name == BACKEND:
            complain(f"upstreams.{name}", "this name means the local engine; choose another")
        if not name.isprintable():
            complain("upstreams", f"{name!r} cannot be said in a header; choose another name")
        _check_url(f"upstreams.{name}.base_url", upstream.base_url, complain, is_base=True)
        if upstream.api_key is not None and not (upstream.api_key.isascii() and upstream.api_key.isprintable()):
            complain(f"upstreams.{name}.api_key", "must be one line of ASCII characters")
        check = upstream.health_check
        for what, path in (("health_check.path", check.path if check else None), ("metrics", upstream.metrics)):
            if path is not None and not (
                path.startswith("/") and path.isascii() and path.isprintable() and " " not in path
            ):
                complain(f"upstreams.{name}.{what}", f"must be a path that begins with /, got {path!r}")
    if settings.backend is not None and settings.backend.url is not None:
        _check_url("backend.url", settings.backend.url, complain, is_base=True)
    if settings.admin_token is not None and len(settings.admin_token) < 16:
        complain("admin_token", "must have at least 16 characters; `openssl rand -hex 24` makes a good one")


def _check_url(path: str, url: str, complain: Complain, *, is_base: bool = False) -> None:
    if not url.startswith(("http://", "https://")):
        complain(path, f"must be a URL that begins with http:// or https://, got {url!r}")
    elif not _names_a_host(url):
        complain(path, "is no URL: a host with an optional port and path, in ASCII, is needed after the //")
    elif is_base and any(mark in url for mark in "?#@"):
        complain(path, "takes no user, query or fragment: none of them would be sent")


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # a port that is none, half an IPv6 address
        return False


def _places(settings: Settings) -> list[str]:
    return ([BACKEND] if settings.backend is not None else []) + list(settings.upstreams)


def _check_model(settings: Settings, name: str, model: Model, complain: Complain) -> None:
    path = f"models.{name}"
    places = _places(settings)
    known = ", ".join(places) or "none (add `backend:` or `upstreams:`)"
    for where, target in _targets(path, model):
        if target not in places:
            missing = "there is no `backend:` section" if target == BACKEND else f"no upstream is called {target!r}"
            complain(where, f"{missing}; known: {known}")
    if not model.deployments:
        complain(f"{path}.deployments", "needs at least one")
    elif not any(deployment.weight for deployment in model.deployments):
        complain(f"{path}.deployments", "every weight is 0: no request could be served")
    from proxy.routing import deployment_names

    names = deployment_names(name, model)
    if len(set(names)) < len(names):
        complain(f"{path}.deployments", "the same place and model twice; add up their weights")
    _check_drafts(settings, path, model, complain)
    _check_ramp(name, path, model, complain)
    if model.price is not None:
        _check_price(f"{path}.price", model.price, complain)
    for index, deployment in enumerate(model.deployments):
        if deployment.cost is not None:
            _check_price(f"{path}.deployments[{index}].cost", deployment.cost, complain)


def _targets(path: str, model: Model) -> Iterator[tuple[str, str]]:
    for index, deployment in enumerate(model.deployments):
        yield f"{path}.deployments[{index}].to", deployment.to
    for index, name in enumerate(model.fallback):
        yield f"{path}.fallback[{index}]", name


def _check_drafts(settings: Settings, path: str, model: Model, complain: Complain) -> None:
    backend = settings.backend
    local = backend is not None and backend.url is None and any(item.to == BACKEND for item in model.deployments)
    for index, draft in enumerate(model.drafts):
        if local and backend is not None and draft not in backend.drafts:
            known = ", ".join(backend.drafts) or "none"
            complain(f"{path}.drafts[{index}]", f"the backend has no draft {draft!r}; backend.drafts has: {known}")
    for index, deployment in enumerate(model.deployments):
        if deployment.draft is not None and deployment.draft not in model.drafts:
            allowed = ", ".join(model.drafts) or "none"
            message = f"{deployment.draft!r} is not among the drafts of this model: {allowed}"
            complain(f"{path}.deployments[{index}].draft", message)
    if model.default_draft is not None and model.default_draft not in model.drafts:
        allowed = ", ".join(model.drafts) or "none"
        complain(f"{path}.default_draft", f"{model.default_draft!r} is not among the drafts of this model: {allowed}")
    if model.speculative == "enabled" and not model.drafts:
        complain(f"{path}.speculative", "`enabled` needs at least one name in drafts")


def _check_ramp(name: str, path: str, model: Model, complain: Complain) -> None:
    ramp = model.ramp
    if ramp is None:
        return
    from proxy.routing import deployment_names

    known = deployment_names(name, model)
    if ramp.deployment not in known:
        complain(f"{path}.ramp.deployment", f"no deployment {ramp.deployment!r}; this model has: {', '.join(known)}")
    elif len(known) < 2:
        complain(f"{path}.ramp", "needs a second deployment to take the rest of the requests")
    if not ramp.steps or list(ramp.steps) != sorted(set(ramp.steps)):
        complain(f"{path}.ramp.steps", "must rise, for example [10, 25, 50, 75, 90]")


def _check_price(path: str, price: Price, complain: Complain) -> None:
    for name in ("input", "cache_read", "cache_write", "output", "output_reasoning"):
        text = getattr(price, name)
        if text is None:
            continue
        try:
            parse_price(text)
        except MoneyError as error:
            complain(f"{path}.{name}", str(error))


def _check_billing(settings: Settings, complain: Complain) -> None:
    try:
        FxRate.parse("USD", "CNY", settings.fx.USD_CNY)
    except MoneyError as error:
        complain("fx.USD_CNY", str(error))
    try:
        zone(settings.billing.timezone)
    except Invalid:
        complain(
            "billing.timezone", f"no such time zone: {settings.billing.timezone!r}; for example Asia/Shanghai or UTC"
        )
