"""`tallygate serve` as a real process: what it starts, what it refuses to start, and how all of it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import httpx
import psutil
import pytest

from proxy.seeding import prepare
from proxy.settings import load_settings
from tests.conftest import run_apart
from tests.services import ROOT, Served, free_port, http_ok, wait_until
from tests.upstream.process import FakeUpstream

TALLYGATE = [sys.executable, "-P", "-m", "proxy.cli"]
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("TALLYGATE")}
ASK = {"model": "deepseek-v3.2", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 16}


class Serving(Served):
    """`tallygate serve` in front of a fake upstream; ready when its screen is complete."""

    def __init__(self, base_dir: Path, upstream: FakeUpstream, *arguments: str) -> None:
        self.port = free_port()
        self.root = f"http://127.0.0.1:{self.port}"
        self.base_dir = base_dir
        config = base_dir / "tallygate.yaml"
        config.write_text(
            f"upstreams: {{legacy: {{base_url: {upstream.base_url}}}}}\n"
            "models:\n"
            "  deepseek-v3.2:\n"
            "    deployments: [{to: legacy}]\n"
            "    drafts: [qwen-0.5b]\n"
            "    max_output_tokens: 20000000\n"
            '    price: {currency: USD, input: "0.28", cache_read: "0.028", output: "0.42"}\n'
        )
        options = ["--config", str(config), "--data-dir", str(base_dir), "--port", str(self.port)]
        super().__init__([*TALLYGATE, "serve", *options, *arguments], ready=self._screen_complete, cwd=base_dir)

    def _screen_complete(self) -> bool:
        return "Ctrl-C stops it" in self.output()

    @property
    def key(self) -> str:
        return (self.base_dir / "data/demo-key").read_text().strip()

    def ask(self, **changes: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.post(f"{self.root}/v1/chat/completions", json=ASK | changes, headers=headers, timeout=30)

    def administrator(self) -> httpx.Client:
        """With the token of the first start."""
        token = re.search(r"tg-admin-\S+", self.output())
        assert token is not None
        headers = {"authorization": f"Bearer {token[0]}"}
        return httpx.Client(base_url=f"{self.root}/admin/v1", headers=headers, timeout=30)

    def children(self) -> dict[str, psutil.Process]:
        """Role → process."""
        found = {}
        for process in psutil.Process(self.pid).children():
            words: list[str] = []
            with contextlib.suppress(psutil.Error):  # it may end while we look
                words = process.cmdline()
            if "proxy.cli" in words:
                found[words[words.index("proxy.cli") + 1]] = process
        return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, upstream_process: FakeUpstream) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("serving"), upstream_process) as process:
        yield process


def refused(base_dir: Path, *arguments: str) -> str:
    """The one line of a start that must fail with exit code 2 and leave nothing running."""
    command = [*TALLYGATE, "serve", "--data-dir", str(base_dir), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRON, timeout=120, check=False)
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    assert len(lines) == 1, ran.stderr
    assert not _processes_of(base_dir)
    return lines[0]


def _processes_of(base_dir: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(base_dir) in (process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def test_the_screen_names_the_url_the_key_and_who_answers(serving: Serving) -> None:
    screen = serving.output()
    assert f"{serving.root}/v1" in screen
    assert serving.key in screen
    assert re.search(r"admin token +tg-admin-\S+ +\(shown this once", screen)
    assert "answered by legacy's deepseek-v3.2" in screen
    assert "0.28 in, 0.028 cached, 0.42 out, USD per 1M tokens (version pv_1)" in screen
    assert (serving.base_dir / "data/config-path").read_text() == f"{serving.base_dir / 'tallygate.yaml'}\n"
    curl = next(line for line in screen.splitlines() if line.strip().startswith("curl"))
    ran = subprocess.run(["sh", "-c", curl.strip().replace("curl ", "curl -s ", 1)], capture_output=True, check=False)
    if ran.returncode != 127:  # no curl on this machine
        assert json.loads(ran.stdout)["usage"]["tallygate"]["billed_tokens"] > 0


def test_the_python_snippet_of_the_readme_runs_with_nothing_changed_but_the_key(serving: Serving) -> None:
    readme = (ROOT / "README.md").read_text()
    snippet = readme.partition("```python\n")[2].partition("```")[0]
    assert "sk-tg-..." in snippet
    snippet = snippet.replace("sk-tg-...", serving.key).replace("http://127.0.0.1:8000", serving.root)
    ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "cost_cny" in ran.stdout


def test_a_request_through_the_demo_key_is_priced_in_both_currencies_and_posted(serving: Serving) -> None:
    answer = serving.ask()
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert set(usage["tallygate"]) >= {"billed_tokens", "cost_usd", "cost_cny", "price_version"}
    request_id = answer.headers["x-request-id"]
    with serving.administrator() as admin:
        wait_until(lambda: admin.get(f"/requests/{request_id}").status_code == 200, 30, "the posted request")
        detail = admin.get(f"/requests/{request_id}").json()
        row = detail["usage"]
        assert row in admin.get("/usage").json()["data"]
        assert (row["prompt_tokens"], row["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert row["billed_tokens"] == usage["total_tokens"]
        costs = {name: usage["tallygate"][name] for name in ("cost_usd", "cost_cny", "price_version")}
        assert {name: row[name] for name in costs} == costs
        assert sum(Decimal(transfer["amount"]) for transfer in detail["transfers"]) == Decimal(costs["cost_usd"])
        assert detail["receipt"]["request_id"] == request_id
        sums = admin.get("/usage", params={"group_by": "model,day", "team": "demo"}).json()["data"]
        assert {item["model"] for item in sums} == {"deepseek-v3.2"}
        spent = Decimal(10) - Decimal(admin.get("/teams/demo/balance").json()["prepaid"])
        assert spent == sum(Decimal(item["cost_usd"]) for item in sums)
        (of_all_teams,) = admin.get("/usage", params={"group_by": "model"}).json()["data"]
        compared = admin.get("/reports/canary", params={"model": "deepseek-v3.2"}).json()["data"]
        assert [(item["deployment"], item["cost_usd"]) for item in compared] == [("legacy", of_all_teams["cost_usd"])]
        proof = admin.post("/verify").json()
        assert proof["ok"], proof
        document = admin.get(
            "/invoices/export", params={"team": "demo", "month": row["period"], "format": "json"}
        ).json()
        assert Decimal(document["cost_usd"]) == spent


def test_12_8_million_output_tokens_cost_the_same_in_answer_ledger_api_and_export(
    serving: Serving, upstream: FakeUpstream
) -> None:
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "deepseek-v3.2",
        "choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "…"}}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 12_800_000, "total_tokens": 12_800_000},
    }
    upstream.standing_fault({"body": json.dumps(answer)}, times=1)
    with serving.administrator() as admin:
        team = admin.post("/teams", json={"name": "twelve", "billing_currency": "CNY"}).json()["id"]
        admin.post(f"/teams/{team}/topups", json={"amount": "40", "currency": "CNY", "reference": "twelve"})
        key = admin.post("/keys", json={"team_id": team}).json()["key"]
        body = ASK | {"max_tokens": 12_800_000}
        headers = {"authorization": f"Bearer {key}"}
        got = httpx.post(f"{serving.root}/v1/chat/completions", json=body, headers=headers, timeout=30)
        assert got.status_code == 200, got.text
        block = got.json()["usage"]["tallygate"]
        assert (block["billed_tokens"], block["cost_usd"], block["cost_cny"]) == (12_800_000, "5.376", "39.2448")
        path = f"/requests/{got.headers['x-request-id']}"
        wait_until(lambda: admin.get(path).status_code == 200, 30, "the posted request")
        detail = admin.get(path).json()
        assert (detail["usage"]["cost_usd"], detail["usage"]["cost_cny"]) == ("5.376", "39.2448")
        assert [transfer["amount"] for transfer in detail["transfers"]] == ["39.2448"]
        assert admin.get(f"/teams/{team}/balance").json()["prepaid"] == "0.7552"
        month = {"team": team, "month": detail["usage"]["period"]}
        statement = admin.get("/invoices/export", params=month | {"format": "json"}).json()
        assert (statement["cost_usd"], statement["cost_cny"]) == ("5.376", "39.2448")
        assert "5.376,39.2448" in admin.get("/invoices/export", params=month | {"format": "csv"}).text


def test_secrets_are_readable_by_their_owner_alone(serving: Serving) -> None:
    for name in ("demo-key", "key-secret"):
        mode = stat.S_IMODE((serving.base_dir / "data" / name).stat().st_mode)
        assert mode == 0o600


def test_children_stay_in_the_process_group_of_the_supervisor(serving: Serving) -> None:
    children = serving.children()
    assert set(children) == {"gateway", "poster"}
    assert {os.getpgid(child.pid) for child in children.values()} == {os.getpgid(serving.pid)}


def test_a_crashed_child_is_restarted(serving: Serving) -> None:
    for role in ("poster", "gateway"):
        before = serving.children()[role].pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: _restarted(serving, role, before), 30)  # noqa: B023
        wait_until(lambda: http_ok(f"{serving.root}/health/ready"), 30)
        assert serving.ask().status_code == 200
    assert "poster ended (killed by SIGKILL); restarting in 0.5 s" in serving.output()


def test_a_killed_gateway_bills_no_more_prompt_than_the_upstream_read(serving: Serving, upstream: FakeUpstream) -> None:
    upstream.standing_fault({"chunk_delay_ms": 60, "tokens": 100}, times=1)
    body = ASK | {"stream": True, "max_tokens": 100, "metadata": {"of no use to the model": "x" * 400}}
    headers = {"authorization": f"Bearer {serving.key}"}
    before = serving.children()["gateway"].pid
    with (
        contextlib.suppress(httpx.TransportError),
        httpx.stream("POST", f"{serving.root}/v1/chat/completions", json=body, headers=headers, timeout=30) as answer,
    ):
        request_id = answer.headers["x-request-id"]
        for n, _ in enumerate(answer.iter_lines()):
            if n == 60:  # thirty tokens: about two seconds, so that progress is in the journal
                os.kill(before, signal.SIGKILL)
    with serving.administrator() as admin:
        wait_until(lambda: _restarted(serving, "gateway", before), 30)
        wait_until(lambda: http_ok(f"{serving.root}/health/ready"), 30)
        wait_until(lambda: admin.get(f"/requests/{request_id}").status_code == 200, 20, "the recovered request")
        row = admin.get(f"/requests/{request_id}").json()["usage"]
    assert (row["status"], row["estimated"]) == ("crashed", True)
    assert 0 < row["generated_tokens"] <= 30
    assert 0 < row["prompt_tokens"] <= upstream.entry(request_id)["prompt_tokens"]


def _restarted(serving: Serving, role: str, before: int) -> bool:
    child = serving.children().get(role)
    return child is not None and child.pid != before


def test_a_second_supervisor_on_the_same_data_is_refused(serving: Serving) -> None:
    port = str(free_port())
    command = [*TALLYGATE, "serve", "--data-dir", str(serving.base_dir), "--port", port]
    ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRON, timeout=120, check=False)
    assert ran.returncode == 2
    assert f"already runs on {serving.base_dir / 'data'} (process {serving.pid})" in ran.stderr


def test_a_stop_drains_the_running_stream_and_everything_is_gone_within_ten_seconds(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    with Serving(tmp_path, upstream) as serving:
        upstream.standing_fault({"chunk_delay_ms": 150, "tokens": 12}, times=1)
        lines: list[str] = []

        def stream() -> None:
            body = ASK | {"stream": True, "stream_options": {"include_usage": True}}
            headers = {"authorization": f"Bearer {serving.key}"}
            url = f"{serving.root}/v1/chat/completions"
            with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        client = threading.Thread(target=stream)
        client.start()
        wait_until(lambda: len(lines) > 1, 30)
        began = time.monotonic()
        assert serving.stop(timeout_s=60) == 0
        assert time.monotonic() - began < 20  # ten on a machine without other tests
        client.join()
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 12
        assert not _processes_of(tmp_path)
        verified = subprocess.run(
            [*TALLYGATE, "verify", "--data-dir", str(tmp_path), "--json"], capture_output=True, text=True, check=False
        )
        report = json.loads(verified.stdout)
        assert (verified.returncode, report["unposted"]) == (0, 0)
        assert next(check["counted"] for check in report["checks"] if check["name"] == "usage") == 1


def test_a_stop_while_the_model_is_still_loading_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [*TALLYGATE, "serve", "--data-dir", str(tmp_path), "--port", str(free_port())]
    with Served(
        command, ready=lambda: True, cwd=tmp_path, env=dict.fromkeys(set(os.environ) - set(ENVIRON), "")
    ) as house:
        wait_until(lambda: "starting the backend" in house.output() or not house.running(), 60, "the loading")
        began = time.monotonic()
        assert house.stop(timeout_s=60) == 0
        assert time.monotonic() - began < 20  # ten on a machine without other tests
        assert not _processes_of(tmp_path)
        assert not _processes_of(tmp_path / "data")


def test_the_second_start_shows_the_same_key_and_no_child_survives_a_killed_supervisor(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    with Serving(tmp_path, upstream) as first:
        key = first.key
    began = time.monotonic()
    with Serving(tmp_path, upstream) as second:
        assert second.ask().status_code == 200
        took = time.monotonic() - began
        assert key in second.output()
        assert "tg-admin-" not in second.output()
        assert took < 60  # 3 s alone on two cores
        children = list(second.children().values())
        os.kill(second.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []


def test_a_damaged_journal_stops_the_start_and_is_named(tmp_path: Path, upstream: FakeUpstream) -> None:
    with Serving(tmp_path, upstream) as first:
        first.children()["poster"].suspend()
        assert first.ask().status_code == 200
        first.kill()
    segment = max((tmp_path / "data/journal").rglob("*.seg"))
    os.truncate(segment, 300)
    options = ["--config", str(tmp_path / "tallygate.yaml"), "--data-dir", str(tmp_path), "--port", str(free_port())]
    ran = subprocess.run([*TALLYGATE, "serve", *options], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    line = ran.stderr.splitlines()[-1]
    assert f"{segment}: no valid frame 1 at byte " in line
    assert "Application startup failed" not in line


def test_a_taken_port_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(tmp_path, "--config", _gateway_only(tmp_path), "--port", str(port))
    assert line == (
        f"tallygate: port {port} on 127.0.0.1 is taken: stop what listens there, or choose another with --port"
    )


def test_a_bad_configuration_is_refused_on_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("server:\n  prt: 1\n")
    assert refused(tmp_path, "--config", str(file)).startswith(f"{file}:2: server.prt: unknown key")


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    gone = tmp_path / "no-model"
    file.write_text(f"backend: {{target: {gone}}}\nmodels: {{m: {{deployments: [{{to: backend}}]}}}}\n")
    line = refused(tmp_path, "--config", str(file), "--port", str(free_port()))
    assert line.startswith(f"tallygate: backend.target: no model at {gone}: it must be a directory with a config.json")


def test_an_unwritable_data_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a-file"
    file.write_text("")
    line = refused(file, "--config", _gateway_only(tmp_path), "--port", str(free_port()))
    assert line.startswith(f"tallygate: cannot write to {file / 'data'} (Not a directory): make it writable")


def test_a_first_start_needs_its_database_or_the_other_hosts_secret(tmp_path: Path) -> None:
    config = Path(_gateway_only(tmp_path))
    config.write_text(
        config.read_text() + f"storage: {{database: 'postgresql://u:hunter2@127.0.0.1:{free_port()}/x'}}\n"
    )
    line = refused(tmp_path, "--config", str(config), "--port", str(free_port()))
    assert line.startswith("tallygate: the database is not available")
    assert line.endswith("without it nobody knows whether this host needs another's key-secret")
    assert "hunter2" not in line
    assert not (tmp_path / "data/key-secret").exists()


def test_a_lost_key_secret_is_noticed_before_every_key_fails(base_dir: Path) -> None:
    config = _gateway_only(base_dir)
    settings = load_settings(config, base_dir, environ={})
    run_apart(lambda: prepare(settings))
    (base_dir / "data/key-secret").unlink()
    line = refused(base_dir, "--config", config, "--port", str(free_port()))
    assert line.startswith(f"tallygate: {base_dir / 'data/key-secret'} is missing")


def test_no_role_or_command_makes_a_fresh_secret_beside_keys_of_another(base_dir: Path) -> None:
    config = _gateway_only(base_dir)
    run_apart(lambda: prepare(load_settings(config, base_dir, environ={})))
    secret = base_dir / "data/key-secret"
    secret.unlink()
    for role in (("gateway", "--port", str(free_port())), ("key", "create", "--team", "demo")):
        command = [*TALLYGATE, *role, "--data-dir", str(base_dir), "--config", config]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRON, timeout=120, check=False)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr.startswith(f"tallygate: {secret} is missing")
        assert not secret.exists()


def _gateway_only(base_dir: Path) -> str:
    file = base_dir / "gateway.yaml"
    file.write_text("upstreams: {legacy: {base_url: 'http://127.0.0.1:9/v1'}}\n")
    return str(file)


@pytest.mark.parametrize(
    ("host", "demo"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
)
def test_a_server_that_other_hosts_can_reach_starts_without_a_demo_key(tmp_path: Path, host: str, demo: bool) -> None:
    (tmp_path / "data").mkdir()
    settings = load_settings(None, tmp_path, {"server.host": host})
    first_run = run_apart(lambda: prepare(settings))
    assert (first_run.demo_key is not None) == demo
