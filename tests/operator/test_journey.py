"""The main job, end to end: `make serve`'s own entry point in an empty directory, to the exported invoice.

Nothing is configured and nothing is fake: the bundled weights answer, through the real OpenAI SDK.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services import Served, free_port, wait_until

TALLYGATE = [sys.executable, "-P", "-m", "proxy.cli"]
SPECULATE = {"X-Speculative-Decoding": "enabled", "X-Draft-Model": "qwen-0.5b"}
QUESTION = [{"role": "user", "content": "Write one sentence about green tea."}]
INPUT, OUTPUT, CNY = Decimal("0.28"), Decimal("0.42"), Decimal("7.3")
DRAFTS = ("qwen-0.5b", "llama-3.2-1b", "gpt2-small")


class House(Served):
    """`tallygate serve` without a configuration."""

    def __init__(self, base_dir: Path) -> None:
        self.base_dir = base_dir
        self.url = ""
        port = str(free_port())
        command = [*TALLYGATE, "serve", "--data-dir", str(base_dir), "--port", port]
        environ = {name: "" for name in os.environ if name.startswith("TALLYGATE")}
        super().__init__(command, ready=self._complete, cwd=base_dir, env=environ, ready_within_s=170)

    def _complete(self) -> bool:
        found = re.search(r"base_url +(\S+)[\s\S]*Ctrl-C stops it", self.output())
        self.url = found[1] if found else ""
        return found is not None

    def client(self) -> openai.OpenAI:
        found = re.search(r"key +(sk-tg-\w+)", self.output())
        assert found is not None
        return openai.OpenAI(base_url=self.url, api_key=found[1], timeout=120, max_retries=0)

    def shell(self, *arguments: str) -> Any:
        """A command's JSON answer."""
        command = [*TALLYGATE, *arguments, "--data-dir", str(self.base_dir), "--json"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=self.base_dir, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journey")


@pytest.fixture(scope="module")
def house(base_dir: Path) -> Iterator[House]:
    with House(base_dir) as house:
        yield house


def price(usage: Any) -> tuple[Decimal, Decimal]:
    """What the answer's own counts cost, in USD and CNY."""
    cached = usage.prompt_tokens_details.cached_tokens or 0
    prompt = (usage.prompt_tokens - cached) * INPUT + cached * INPUT / 10
    usd = (prompt + usage.completion_tokens * OUTPUT) / 1_000_000
    return usd, usd * CNY


def check_usage(usage: Any) -> None:
    block = usage.model_extra["tallygate"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens == block["billed_tokens"]
    assert (Decimal(block["cost_usd"]), Decimal(block["cost_cny"])) == price(usage)
    speculative = block["speculative"]
    assert speculative["draft_model"] == "qwen-0.5b"
    assert speculative["accepted_tokens"] <= speculative["draft_tokens"]
    assert 0 < speculative["target_passes"] <= usage.completion_tokens + 1


@pytest.mark.timeout(600)
def test_from_an_empty_directory_to_the_exported_invoice(house: House, base_dir: Path) -> None:
    screen = house.output()
    assert "answered by SmolLM2-135M-Instruct" in screen
    with house.client() as client:
        model = next(item for item in client.models.list().data if item.id == "deepseek-v3.2")
        assert "SmolLM2-135M-Instruct" in json.dumps(model.model_extra)
        plain = client.chat.completions.create(
            model="deepseek-v3.2", messages=QUESTION, max_tokens=12, temperature=0, extra_headers=SPECULATE
        )
        assert plain.choices[0].message.content
        check_usage(plain.usage)
        text, streamed = _stream(client)
        assert text  # in bfloat16 near ties may fall either way; equal texts are promised, and tested, in float32
        check_usage(streamed)
        _check_errors(client)

    usages = [plain.usage, streamed]
    wait_until(lambda: len(house.shell("usage")["data"]) == 2, 60, "both requests in SQL")
    rows = house.shell("usage")["data"]
    assert sorted(row["billed_tokens"] for row in rows) == sorted(usage.total_tokens for usage in usages)
    assert house.stop(timeout_s=60) == 0

    with House(base_dir) as again:
        with again.client() as client:
            client.chat.completions.create(model="deepseek-v3.2", messages=QUESTION, max_tokens=4, temperature=0)
        wait_until(lambda: len(again.shell("usage")["data"]) == 3, 60, "the third request in SQL")
        _check_books(again)


def _stream(client: openai.OpenAI) -> tuple[str, Any]:
    text, usage = "", None
    stream = client.chat.completions.create(
        model="deepseek-v3.2",
        messages=QUESTION,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers=SPECULATE,
    )
    for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert usage is not None
    return text, usage


def _check_errors(client: openai.OpenAI) -> None:
    def ask(**changes: Any) -> Any:
        wanted: dict[str, Any] = {"model": "deepseek-v3.2", "messages": QUESTION, "max_tokens": 4}
        return client.chat.completions.create(**wanted | changes)

    with pytest.raises(openai.BadRequestError) as refused:
        ask(extra_headers={"X-Draft-Model": "nonsense"})
    assert (refused.value.code, refused.value.param) == ("speculative_model_not_supported", "X-Draft-Model")
    assert all(draft in refused.value.message for draft in DRAFTS)
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(model="gpt-nothing")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as wrong:
        openai.OpenAI(base_url=client.base_url, api_key="sk-tg-wrong", max_retries=0).models.list()
    assert wrong.value.code == "invalid_api_key"


def _check_books(house: House) -> None:
    """Rows = sums = invoice, in both currencies, and the proof agrees."""
    rows = house.shell("usage")["data"]
    totals = {name: sum(Decimal(row[name]) for row in rows) for name in ("cost_usd", "cost_cny")}
    assert totals["cost_cny"] == totals["cost_usd"] * CNY
    (summed,) = house.shell("usage", "--group-by", "model")["data"]
    assert {name: Decimal(summed[name]) for name in totals} == totals
    balance = house.shell("balance", "--team", "demo")
    assert Decimal(balance["prepaid"]) == 10 - totals["cost_usd"]
    months = sorted({row["period"] for row in rows})
    exported = {name: Decimal(0) for name in totals}
    for month in months:
        export = ("invoice", "export", "--team", "demo", "--month", month)
        statement = json.loads(Path(house.base_dir, _exported(house, *export, "--format", "json")).read_text())
        table = Path(house.base_dir, _exported(house, *export, "--format", "csv")).read_text("utf-8-sig")
        line = next(line for line in csv.reader(io.StringIO(table)) if line[:1] == ["Total"])
        assert {statement["cost_usd"], statement["cost_cny"]} <= set(line)
        for name in exported:
            exported[name] += Decimal(statement[name])
    assert exported == totals
    assert house.shell("verify")["ok"]


def _exported(house: House, *arguments: str) -> str:
    name: str = house.shell(*arguments)["file"]
    return name
