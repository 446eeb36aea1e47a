"""A tiny model directory with a real byte-level tokenizer, and a served backend around it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from backend.server import ServerState, build_app
from backend.service import Settings, load_service
from tests.backend.families import random_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(directory: Path, *, family: str = "llama", seed: int = 0, swap: bool = False) -> Path:
    """Random weights over bytes: 256 byte tokens, three special ones. swap exchanges two tokens (another tokenizer)."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swap:
        alphabet[65], alphabet[66] = alphabet[66], alphabet[65]
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    random_model(family, seed, vocabulary=264).save_pretrained(str(directory))
    return directory


@contextlib.contextmanager
def served(settings: Settings) -> Iterator[tuple[str, ServerState]]:
    """(base URL, state) of a backend on a free port."""
    state = ServerState(settings.served_models)
    server = uvicorn.Server(uvicorn.Config(build_app(state), port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    state.ready(load_service(settings, lambda _: None))
    try:
        yield f"http://127.0.0.1:{port}", state
    finally:
        server.should_exit = True
        thread.join(timeout=15)
