"""The gateway of the proxy's tests, and real clients of the other dialects for it."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.proxy.conftest import gateway, shared_gateway
from tests.proxy.serving import Gateway

__all__ = ["claude", "client", "gateway", "shared_gateway"]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


@pytest.fixture
def claude(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    address = f"http://127.0.0.1:{gateway.port}"
    with anthropic.Anthropic(base_url=address, api_key=gateway.key, max_retries=0) as client:
        yield client
