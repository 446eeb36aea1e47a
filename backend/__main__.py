"""`python -m backend`: load a target and its drafts, and serve them."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.server import ServerState
    from backend.service import Settings

_EXAMPLE = """example:
  python -m backend --target demo --draft qwen-0.5b=demo --draft lookup=ngram --served-model deepseek-v3.2

weights are `demo` (the bundled pair), a model directory, or a hub id; a draft may also be `ngram` (no model) or
`ngram+WEIGHTS` (the text first, the model where the text has nothing)."""

_WAIT_ASLEEP = ("OMP_WAIT_POLICY", "PASSIVE")
"""Read by OpenMP when torch is loaded. Its threads else spin at the end of each operation for one that the system has
put aside: with one core busy elsewhere, an answer took 9 to 28 s instead of 2 to 3 s (2 cores, 40 tokens)."""


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 stopped on request, 2 could not start (one line on stderr says why and what to do)."""
    given = _parser().parse_args(arguments)
    drafts: dict[str, str] = {}
    for pair in given.draft:
        name, equals, weights = pair.partition("=")
        if not (name and equals and weights):
            return _refuse(f"--draft takes NAME=WEIGHTS, not {pair!r}")
        drafts[name] = weights
    try:
        listener = _listen(given.host, given.port)
    except OSError as error:
        return _refuse(f"cannot listen on {given.host}:{given.port} ({error.strerror}); choose another with --port")
    os.environ.setdefault(*_WAIT_ASLEEP)
    from backend.service import Settings

    settings = Settings(
        target=given.target,
        drafts=drafts,
        served_models=tuple(given.served_model or [given.target]),
        data_dir=Path(given.data_dir),
        max_batch=given.max_batch,
        device=given.device,
        dtype=given.dtype,
        context=given.context,
        queue_limit=given.queue,
        chunk_tokens=given.chunk,
        draft_length=given.draft_length,
        threads=given.threads,
    )
    return _serve(settings, listener)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m backend",
        description="Serve a language model with speculative decoding, in the OpenAI dialect.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target", default="demo", metavar="WEIGHTS", help="the model that answers (default: demo)")
    add("--draft", action="append", default=[], metavar="NAME=WEIGHTS", help="a draft model; may be given again")
    add("--served-model", action="append", metavar="NAME", help="name to answer to; may be given again")
    add("--max-batch", type=_positive, default=8, metavar="N", help="requests that run at once (default: 8)")
    add("--queue", type=_positive, default=256, metavar="N", help="requests that may wait (default: 256)")
    add("--context", type=_positive, metavar="TOKENS", help="prompt and answer together (default: up to 8192)")
    add("--chunk", type=_positive, default=256, metavar="TOKENS", help="prompt tokens read per round (default: 256)")
    add("--draft-length", type=int, metavar="K", help="always draft K tokens (default: adaptive)")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="default: auto")
    add("--threads", type=_positive, metavar="N", help="CPU threads (default: all cores)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8001)
    add("--data-dir", default="data", metavar="DIR", help="where converted weights are kept (default: data)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    return listener


def _serve(settings: Settings, listener: socket.socket) -> int:
    import uvicorn

    from backend.server import ServerState, build_app

    state = ServerState(settings.served_models)
    config = uvicorn.Config(
        build_app(state), log_level="warning", access_log=False, timeout_graceful_shutdown=5, timeout_keep_alive=75
    )

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the handlers below stop it; uvicorn's own would raise the signal again after a clean stop

    server = Server(config)

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    def load() -> None:
        _load(settings, state)
        server.should_exit = server.should_exit or state.failure is not None

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threading.Thread(target=load, name="loading", daemon=True).start()
    server.run(sockets=[listener])
    if state.failure is not None:
        return _refuse(state.failure)
    return 0


def _load(settings: Settings, state: ServerState) -> None:
    """Load in the background; /health tells how far it is. A failure stops the server."""
    from backend.errors import BackendError
    from backend.service import load_service

    def progress(text: str) -> None:
        state.progress = text
        print(f"backend: {text}", file=sys.stderr, flush=True)

    try:
        service = load_service(settings, progress)
    except BackendError as error:
        state.failure = str(error)
    except Exception as error:
        state.failure = f"loading failed: {error!r}"
    else:
        state.ready(service)
        drafts = ", ".join(f"{name} = {weights}" for name, weights in service.drafts.items()) or "none"
        progress(f"ready: {service.weights}; drafts: {drafts}")


def _refuse(message: str) -> int:
    print(f"backend: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
