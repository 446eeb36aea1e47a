from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.policies.stores import NOON, Store
from tests.services import Valkey


@pytest.fixture(scope="session")
def memory_store() -> Iterator[Store]:
    store = Store(None)
    yield store
    store.close()


@pytest.fixture(scope="session")
def valkey_store(valkey: Valkey) -> Iterator[Store]:
    store = Store(valkey)
    yield store
    store.close()


@pytest.fixture(params=["memory", "valkey"])
def store(request: pytest.FixtureRequest) -> Store:
    """Every promise about limits holds on both stores. The clock starts at `NOON`."""
    chosen: Store = request.getfixturevalue(f"{request.param}_store")
    chosen.at(NOON)
    chosen.limiter.take_thresholds()
    return chosen
