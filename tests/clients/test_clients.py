"""Real clients against a served process: each runs its scenarios as a program of its own; what it saw and what the
ledger says is compared here. `make test` installs those that are not Python, or not for our environment."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.services import ROOT, Served, free_port, wait_until
from tests.upstream.answers import WORDS
from tests.upstream.process import FakeUpstream

HERE = Path(__file__).parent
INSTALLED = ROOT / "build/clients"
NODE_PROGRAM = "openai_node.mjs"
"""Copied to where its packages are: node looks for them beside it."""
PYTHON = INSTALLED / "bin/python"
PROGRAMS: dict[str, list[str | Path]] = {
    "openai": [sys.executable, HERE / "with_openai.py"],
    "anthropic": [sys.executable, HERE / "with_anthropic.py"],
    "curl": [sys.executable, HERE / "with_curl.py"],
    "openai-node": [INSTALLED / "bin/node", INSTALLED / NODE_PROGRAM],
    "langchain": [PYTHON, HERE / "with_langchain.py"],
    "litellm": [PYTHON, HERE / "with_litellm.py"],
}
LACKS = {
    "openai": (),
    "anthropic": ("helper", "responses", "streamed_responses", "parsed", "parsed_responses", "broken"),
    "curl": ("asynchronous", "helper", "responses", "streamed_responses", "parsed_responses", "streamed_calls"),
    "openai-node": ("asynchronous", "parsed_responses"),
    "langchain": ("helper", "streamed_responses", "parsed_responses"),
    "litellm": ("helper", "responses", "streamed_responses", "parsed_responses", "broken"),
}
"""Which ways of asking a client does not have, or tells us nothing by."""
FAULTS = ("calls", "json", "slow-chunks")
ADMIN_TOKEN = "a-configured-admin-token"
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
TEXT = "".join(WORDS[number % len(WORDS)] for number in range(16))


def what_lacks(client: str) -> str | None:
    """What to do first, where a client is not installed."""
    if not Path(PROGRAMS[client][0]).exists():
        return f"{client} is not installed: `make build/clients/.installed` does it"
    if client == "curl" and shutil.which("curl") is None:
        return "curl is not installed: `apt install curl`, `dnf install curl` or `brew install curl` does it"
    return None


class TallyGate(Served):
    """`tallygate serve` in front of the fake provider, with a model for each way in which that can answer."""

    def __init__(self, folder: Path, upstream: FakeUpstream) -> None:
        self.port, self.upstream, self.folder = free_port(), upstream, folder
        self.root = f"http://127.0.0.1:{self.port}"
        price = {"currency": "USD", "input": "0.28", "output": "0.42"}
        names = {"m": "gpt-4", **{f"m@{fault}": f"gpt-4@{fault}" for fault in FAULTS}}
        names["m@slow-chunks"] = (
            f"gpt-4@{json.dumps({'name': 'slow-chunks', 'chunk_delay_ms': 60})}"  # to hang up in time
        )
        names |= {f"broken-for-{client}": "gpt-4@cut" for client in PROGRAMS}
        models = {
            name: {"deployments": [{"to": "legacy", "model": model}], "price": price} for name, model in names.items()
        }
        config = {
            "admin_token": ADMIN_TOKEN,
            "upstreams": {"legacy": {"base_url": upstream.base_url}},
            "models": models,
        }
        (folder / "tallygate.yaml").write_text(yaml.safe_dump(config))
        options = ["--config", folder / "tallygate.yaml", "--data-dir", folder, "--port", str(self.port)]
        command = [sys.executable, "-P", "-m", "proxy.cli", "serve", *options]
        super().__init__(command, ready=lambda: "Ctrl-C stops it" in self.output(), env={"PYTHONPATH": str(ROOT)})

    @functools.cache  # noqa: B019 - it lives as long as the tests
    def seen_by(self, client: str) -> dict[str, Any]:
        """Scenario → what the client saw."""
        command = PROGRAMS[client]
        lacking = what_lacks(client)
        assert lacking is None, lacking
        if client == "openai-node":
            shutil.copy(HERE / NODE_PROGRAM, INSTALLED)
        environ = {
            "PATH": os.environ["PATH"],
            "BASE_URL": f"{self.root}/v1",
            "API_KEY": (self.folder / "data/demo-key").read_text().strip(),
            "IMAGE": IMAGE,
            "BROKEN_MODEL": f"broken-for-{client}",
            "PYTHONPATH": str(HERE),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is downloaded
            "LANGSMITH_TRACING": "false",
        }
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def row(self, request_id: str) -> dict[str, Any]:
        """The ledger's record, once it is posted."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
            answer = httpx.get(f"{self.root}/admin/v1/requests/{request_id}", headers=headers)
            found[:] = [answer.json()["usage"]] if answer.status_code == 200 else []
            return bool(found)

        wait_until(look, 30, f"the record of {request_id}")
        return found[0]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TallyGate]:
    """On a provider of its own: what that logged is looked up by tests between which others may run."""
    with FakeUpstream() as upstream, TallyGate(tmp_path_factory.mktemp("clients"), upstream) as tallygate:
        yield tallygate


def ways(*scenarios: str) -> pytest.MarkDecorator:
    """The test runs for each of these scenarios and each client that has it."""
    pairs = [(client, name) for client, lacks in LACKS.items() for name in scenarios if name not in lacks]
    return pytest.mark.parametrize(("client", "scenario"), pairs)


def test_a_machine_without_curl_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install curl" in (what_lacks("curl") or "")


@ways("plain", "stream", "asynchronous", "helper", "responses", "streamed_responses", "picture")
def test_the_text_arrives_whole_with_the_usage_that_is_billed(served: TallyGate, client: str, scenario: str) -> None:
    seen = scenario_of(served, client, scenario)
    assert seen["text"] == TEXT
    assert seen.get("tokens", 16) == 16
    if "request_id" in seen:
        row = served.row(seen["request_id"])
        assert (row["status"], row["generated_tokens"], row["estimated"]) == ("completed", 16, False)


@ways("calls", "streamed_calls")
def test_tools_are_called(served: TallyGate, client: str, scenario: str) -> None:
    seen = scenario_of(served, client, scenario)
    assert seen == {"name": "weather", "arguments": {"city": "Berlin"}}


@ways("parsed", "parsed_responses")
def test_a_schema_is_followed_and_parsed(served: TallyGate, client: str, scenario: str) -> None:
    assert scenario_of(served, client, scenario) == {"city": "Berlin"}


@ways("picture")
def test_an_image_reaches_the_upstream_as_it_was_sent(served: TallyGate, client: str, scenario: str) -> None:
    seen = scenario_of(served, client, scenario)
    content = served.upstream.entry(seen["request_id"])["body"]["messages"][0]["content"]
    assert [part["image_url"]["url"] for part in content if part["type"] == "image_url"] == [IMAGE]


@ways("refused")
def test_a_refusal_is_the_clients_own_error_with_our_code(served: TallyGate, client: str, scenario: str) -> None:
    seen = scenario_of(served, client, scenario)
    assert (seen["kind"], seen["status"], seen["code"]) == ("NotFoundError", 404, "model_not_found")
    assert seen["request_id"]


@ways("broken")
def test_a_stream_that_breaks_off_ends_in_an_error(served: TallyGate, client: str, scenario: str) -> None:
    seen = scenario_of(served, client, scenario)
    assert seen["text"] == "".join(WORDS[:3])
    assert seen["code"] == "upstream_error"


@ways("cancelled")
def test_a_client_that_cancels_stops_the_upstream_and_pays_for_what_it_got(
    served: TallyGate, client: str, scenario: str
) -> None:
    seen = scenario_of(served, client, scenario)
    row, entry = served.row(seen["request_id"]), served.upstream.entry(seen["request_id"])
    assert (row["status"], entry["outcome"]) == ("cancelled", "client_gone")
    assert 5 <= seen["seen"] <= row["generated_tokens"] <= entry["produced_tokens"] < 50


def scenario_of(served: TallyGate, client: str, name: str) -> dict[str, Any]:
    seen: dict[str, Any] = served.seen_by(client)[name] or {"failed": "it saw nothing"}
    assert "failed" not in seen, seen["failed"]
    return seen
