"""One fleet for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fleet.hosts import Fleet, fleet_of
from tests.services import Postgres, Valkey
from tests.upstream.process import FakeUpstream


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, valkey: Valkey, upstream_process: FakeUpstream
) -> Iterator[Fleet]:
    """Two hosts with two workers each. What the counter store does not decide in time on a busy machine is refused with
    503, so that what is let through can be counted exactly."""
    name = postgres.create_database()
    valkey.flush()
    with fleet_of(
        tmp_path_factory.mktemp("fleet"),
        2,
        postgres.url(name),
        valkey.url,
        upstream_process.base_url,
        limits={"on_outage": "refuse"},
    ) as started:
        yield started
    postgres.drop_database(name)
