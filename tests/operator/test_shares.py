"""A start says what of a bound on concurrency a worker and a host gets."""

from __future__ import annotations

from pathlib import Path

from proxy.settings import load_settings
from proxy.shares import shares
from tests.operator.test_cli import Run, tallygate  # noqa: F401


def test_workers_share_a_hosts_bound_out_and_hosts_do_not(
    tmp_path: Path,
    tallygate: Run,  # noqa: F811
) -> None:
    file = tmp_path / "tallygate.yaml"
    places = (
        f"{name}: {{base_url: 'http://{name}/v1', max_concurrency: {most}}}" for name, most in (("a", 10), ("b", 1))
    )
    upstreams = f"upstreams: {{{', '.join(places)}}}"
    shared = "storage: {database: 'postgresql://u@127.0.0.1:9/d', counters: 'redis://h'}"
    file.write_text(f"{upstreams}\nserver: {{workers: 4}}\n{shared}\n")
    assert shares(load_settings(file, tmp_path, environ={})) == [
        "upstreams.a.max_concurrency: 10 on each host are 2 for each of 4 workers, 8 in all",
        "upstreams.b.max_concurrency: 1 on each host are 1 for each of 4 workers, 4 in all",
        "upstreams.a.max_concurrency, upstreams.b.max_concurrency: of each host; of several hosts give each its part",
    ]
    assert (
        shares(load_settings(file, tmp_path, environ={}))[0] in tallygate("config", "check", str(file)).err.splitlines()
    )
    file.write_text(f"{upstreams}\n")
    assert shares(load_settings(file, tmp_path, environ={})) == []
