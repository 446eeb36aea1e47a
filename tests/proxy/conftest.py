"""One gateway and one provider for all tests of this room that do not need their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream

DRAFTS = ["qwen-0.5b", "llama-3.2-1b", "gpt2-small"]


@pytest.fixture(scope="session")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory, upstream_process: FakeUpstream) -> Iterator[Gateway]:
    """Models: `m` on the provider; `deepseek-v3.2` on a backend (the provider again); one `m@…` for each fault."""
    from tests.upstream.faults import FAULTS

    def on(place: str, model: str) -> dict[str, object]:
        return {"deployments": [{"to": place, "model": model}], "price": PRICE}

    models: dict[str, object] = {f"m@{fault}": on("legacy", f"gpt-4@{fault}") for fault in FAULTS}
    models["m"] = on("legacy", "gpt-4") | {"context_tokens": 100_000, "max_output_tokens": 1_000}
    models["free"] = on("legacy", "gpt-4") | {"price": None}
    drafts = {"drafts": DRAFTS, "default_draft": "qwen-0.5b"}
    models["deepseek-v3.2"] = on("backend", "deepseek-v3.2") | drafts
    for fault in ("fifty-chunks", "slow-chunks", "endless"):
        models[f"deepseek-v3.2@{fault}"] = on("backend", f"deepseek-v3.2@{fault}") | drafts
    config = configuration({"legacy": upstream_process.base_url}, **models)  # type: ignore[arg-type]
    config["upstreams"]["legacy"] |= {"idle_timeout_s": 2.0, "first_byte_timeout_s": 2.0, "read_timeout_s": 20}
    config["backend"] = {"url": upstream_process.base_url, "drafts": dict.fromkeys(DRAFTS, "ngram")}
    with Gateway(tmp_path_factory.mktemp("gateway"), config) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway, upstream: FakeUpstream) -> Gateway:
    """The shared gateway, with every deployment rested and the provider's log empty."""
    for route in shared_gateway.app.state.worker.routes.values():
        for deployment in (*route.deployments, *route.fallbacks):
            deployment.fitness.succeeded()
            deployment.fitness.busy_until_ms = 0
    return shared_gateway
