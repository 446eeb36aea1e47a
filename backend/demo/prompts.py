"""Prompts of our users' kind, from the templates and word lists in `words.toml`: product copy, chat, code.

Everything here is our own text. A prompt is held out when its topic is (one topic in twelve, by a stable hash), so
no held-out prompt shares its product, question or task with a training prompt.
"""

from __future__ import annotations

import random
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["product_copy", "product_copy_multilingual", "chat", "code"]
KINDS: tuple[Kind, ...] = ("product_copy", "product_copy_multilingual", "chat", "code")
_WEIGHTS = (30, 20, 28, 22)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that waits for an answer. messages: (role, content) pairs; the last one is the user's."""

    kind: Kind
    messages: tuple[tuple[str, str], ...]
    held_out: bool

    def as_chat(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


def prompts(seed: int) -> Iterator[Prompt]:
    """An endless stream of prompts; held-out ones are mixed in and marked. The same seed gives the same stream."""
    words = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
    rng = random.Random(seed)
    while True:
        kind = rng.choices(KINDS, _WEIGHTS)[0]
        topic, text = _WRITERS[kind](rng, words)
        messages: list[tuple[str, str]] = []
        if rng.random() < 0.3:
            messages.append(("system", rng.choice(words["systems"][kind])))
        messages.append(("user", text))
        if kind == "chat" and rng.random() < 0.2:
            messages += [("assistant", rng.choice(words["stub_answers"])), ("user", rng.choice(words["follow_ups"]))]
        yield Prompt(kind, tuple(messages), is_held_out(topic))


def is_held_out(topic: str) -> bool:
    """True for one topic in twelve, for ever the same ones."""
    return zlib.crc32(topic.encode()) % 12 == 5


def _product(rng: random.Random, words: dict[str, Any]) -> dict[str, str]:
    first, second = rng.sample(words["adjectives"], 2)
    drawn = {"a": first, "b": second}
    for letter, name in (("p", "products"), ("t", "tones"), ("u", "audiences"), ("c", "channels")):
        drawn[letter] = rng.choice(words[name])
    return drawn | {"n": str(rng.choice((30, 50, 80, 100, 150)))}


def _product_copy(rng: random.Random, words: dict[str, Any]) -> tuple[str, str]:
    product = _product(rng, words)
    return product["p"], rng.choice(words["copy"]).format(**product)


def _product_copy_multilingual(rng: random.Random, words: dict[str, Any]) -> tuple[str, str]:
    language = rng.choice(tuple(words["languages"]))
    if rng.random() < 0.4:
        product = _product(rng, words) | {"l": language}
        return product["p"], rng.choice(words["translated"]).format(**product)
    thing = rng.choice(words["languages"][language]["things"])
    return thing, rng.choice(words["languages"][language]["asks"]).format(p=thing)


def _chat(rng: random.Random, words: dict[str, Any]) -> tuple[str, str]:
    if rng.random() < 0.35:
        question = rng.choice(words["questions"])
        return question, question
    subject = rng.choice(words["subjects"])
    return subject, rng.choice(words["requests"]).format(s=subject)


def _code(rng: random.Random, words: dict[str, Any]) -> tuple[str, str]:
    if rng.random() < 0.2:
        snippet = rng.choice(words["snippets"])
        return snippet, rng.choice(words["snippet_asks"]).format(x=snippet)
    task = rng.choice(words["code_tasks"])
    return task, rng.choice(words["code"]).format(g=rng.choice(words["code_languages"]), k=task)


_WRITERS = {
    "product_copy": _product_copy,
    "product_copy_multilingual": _product_copy_multilingual,
    "chat": _chat,
    "code": _code,
}
