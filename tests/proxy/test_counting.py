"""Promises about counting what an upstream does not say: by its own tokenizer, or by cautious rules."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import Invalid
from proxy.counting import RulesOfThumb, counting_of
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import parse_chat, prompt_text
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream

MESSAGES: Any = [
    {"role": "user", "content": "one two three"},
    {"role": "user", "content": [{"type": "text", "text": " four"}]},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """One token a word."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_a_local_tokenizer_counts_words_of_prompt_and_answer(tokenizer: str) -> None:
    counting = counting_of(tokenizer)
    call = parse_chat(json.dumps({"model": "m", "messages": MESSAGES}).encode())
    assert counting.prompt_tokens(prompt_text(call.fields)) == 4
    answer = PlainAnswer(b'{"choices": [{"message": {"role": "assistant", "content": "a b c"}}]}', "choices")
    assert counting.answer_tokens(answer.text(), None) == 3


def test_a_directory_without_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"tokenizer\.json does not exist"):
        counting_of(str(tmp_path))


def test_rules_of_thumb_are_cautious_and_take_deltas_of_streams() -> None:
    rules = RulesOfThumb()
    assert rules.answer_tokens("the bill is what was used", None) == 5
    assert rules.answer_tokens("ignored", 7) == 7
    assert rules.prompt_tokens("") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_upstream_that_reports_nothing_is_counted_with_its_tokenizer(
    tmp_path: Path, tokenizer: str, upstream: FakeUpstream, stream: bool
) -> None:
    model = {"deployments": [{"to": "legacy", "model": "gpt-4@usage-none"}], "price": PRICE}
    config = configuration({"legacy": upstream.base_url}, m=model)
    config["upstreams"]["legacy"]["tokenizer"] = tokenizer
    with Gateway(tmp_path, config) as gateway, gateway.http() as http:
        answer = http.post("/chat/completions", json={"model": "m", "messages": MESSAGES, "stream": stream})
        row = gateway.row(answer.headers["x-request-id"])
    assert (row["prompt_tokens"], row["generated_tokens"], bool(row["estimated"])) == (4, 16, True)
    assert row["estimate_reason"] == "no_usage"


def test_a_long_text_that_is_counted_in_a_thread_lets_the_others_run(tokenizer: str) -> None:
    counting, text = counting_of(tokenizer), "word " * 500_000
    counted: list[int] = []
    counter = threading.Thread(target=lambda: counted.append(counting.prompt_tokens(text)))
    began = woken = time.monotonic()
    longest_s = 0.0
    counter.start()
    while counter.is_alive():
        time.sleep(0.001)
        longest_s, woken = max(longest_s, time.monotonic() - woken), time.monotonic()
    assert counted == [500_000]
    assert longest_s < (woken - began) * 0.8
