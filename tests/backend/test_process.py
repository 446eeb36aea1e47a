"""`python -m backend` as an operator meets it, and the bundled weights."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch

from backend.adaptive import LengthPolicy
from backend.bundled import bundled_target
from backend.costs import StepCosts
from backend.drafts import NgramDraft
from backend.engine import Engine
from backend.loading import load_model, load_tokenizer, stop_tokens_of
from backend.model import PackedModel
from backend.sampling import SamplingParams
from backend.sequence import Request
from tests.backend.families import generated, run, transformers_greedy
from tests.backend.serving import write_model
from tests.services import free_port

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "backend", *arguments],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def test_a_backend_starts_answers_and_stops_on_sigterm(tmp_path: Path) -> None:
    directory, port = write_model(tmp_path / "model"), free_port()
    process = start("--target", str(directory), "--draft", "x=ngram", "--port", str(port), "--threads", "1")
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline
            assert process.poll() is None
            try:
                if httpx.get(url + "/health", timeout=30).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        body = {"model": str(directory), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert httpx.post(url + "/v1/chat/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_a_taken_port_is_one_clear_line_and_exit_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]))
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--port" in complaint
    assert len(complaint.strip().splitlines()) == 1


def test_missing_weights_are_one_clear_line_and_exit_2() -> None:
    process = start("--target", "/no/such/model/here", "--port", str(free_port()))
    _, complaint = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "neither `demo`, nor a directory, nor a hub id" in complaint.strip().splitlines()[-1]


def test_a_malformed_draft_is_one_clear_line_and_exit_2() -> None:
    process = start("--draft", "nonsense")
    _, complaint = process.communicate(timeout=120)
    assert (process.returncode, "NAME=WEIGHTS" in complaint) == (2, True)


@pytest.fixture(scope="module")
def bundled() -> Path:
    return bundled_target(ROOT / "data")


def test_the_bundled_tokenizer_ends_turns_and_splits_digits(bundled: Path) -> None:
    tokenizer = load_tokenizer(bundled)
    assert stop_tokens_of(bundled, tokenizer) == {2}
    prompt = tokenizer.chat([{"role": "user", "content": "12"}, {"role": "assistant", "content": "Once"}])
    assert tokenizer.decode(prompt).endswith("assistant\nOnce")
    assert len(tokenizer.encode("2026", special=False)) == 4
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("é 你好", special=False))) == "é 你好".encode()


def test_the_bundled_target_speculates_without_changing_its_text(bundled: Path) -> None:
    model = load_model(bundled, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(bundled)
    prompt = tokenizer.chat([{"role": "user", "content": "Count from one to twenty: one, two, three, four,"}])
    expected = transformers_greedy(model, prompt, 20)
    target = PackedModel(model, slots=2, capacity=256)
    engine = Engine(target, tokenizer.decode, {"x": NgramDraft()}, policy=LengthPolicy(StepCosts(), fixed=4))
    # transformers forbids the end token where it must go on; a bias does the same here
    greedy = SamplingParams(temperature=0.0, logit_bias=((2, -100.0),))
    plain = Request("plain", prompt, 20, greedy)
    found = run(engine, [plain, dataclasses.replace(plain, id="fast", draft="x")])
    assert generated(found["plain"]) == generated(found["fast"]) == expected
    assert found["fast"].stats.target_passes < 20


def test_a_long_answer_fetched_in_chunks_of_50_is_the_single_answer(bundled: Path) -> None:
    """The client loop: the conversation, and the assistant's text so far, also while that is empty."""
    tokenizer = load_tokenizer(bundled)
    target = PackedModel(load_model(bundled, torch.float32, torch.device("cpu")), slots=2, capacity=512)
    engine = Engine(target, tokenizer.decode, {"x": NgramDraft()}, policy=LengthPolicy(StepCosts(), fixed=3))
    greedy = SamplingParams(temperature=0.0, logit_bias=((2, -100.0),))
    asked = [{"role": "user", "content": "Write a product description for a ceramic tea set."}]
    prompt = tokenizer.chat(asked)
    whole = run(engine, [Request("whole", prompt, 100, greedy, draft="x")])["whole"]
    text, exact = "", True
    for chunk in range(2):
        begun = tokenizer.chat([*asked, {"role": "assistant", "content": text}])
        exact = exact and begun == whole.tokens[: len(begun)]
        found = run(engine, [Request(f"chunk {chunk}", begun, 50, greedy, draft="x")])[f"chunk {chunk}"]
        text += found.text.text
    assert exact  # this text re-tokenises as it was generated, so the chunks have to be the whole
    assert text == whole.text.text
