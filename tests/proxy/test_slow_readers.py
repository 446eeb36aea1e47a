"""Promises about clients that ask and then do not read: they keep no place and no connection of an upstream."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

HELLO: Any = [{"role": "user", "content": "hi"}]


def ask_and_never_read(gateway: Gateway, body: dict[str, Any]) -> socket.socket:
    """A stream is asked for over a connection whose buffers are small, and left there."""
    content = json.dumps(body | {"stream": True}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
    client.connect(("127.0.0.1", gateway.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return client


def test_a_client_that_never_reads_the_end_of_its_stream_keeps_no_place_and_no_connection(
    tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.http_server.LINGER_S", 1.0)
    fault = json.dumps({"name": "all-in-one-packet", "tokens": 400, "framing": "length"})
    model = {"deployments": [{"to": "legacy", "model": f"gpt-4@{fault}"}], "price": PRICE}
    config = configuration({"legacy": upstream.base_url}, large=model, m={})
    config["upstreams"]["legacy"] |= {"idle_timeout_s": 1.0, "max_concurrency": 1}
    with Gateway(tmp_path, config) as gateway:
        worker = gateway.app.state.worker
        gateway._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # of the connections that it accepts
        with ask_and_never_read(gateway, {"model": "large", "messages": HELLO}):
            wait_until(lambda: bool(gateway.rows()), 30, "the settlement")
            wait_until(lambda: worker.admission.running("legacy") == 0, 30, "the place to come free")
            assert worker.gate._open_holds == 0
            wait_until(lambda: not gateway._server.server_state.connections, 30, "the connection to be closed")
        assert gateway.client().chat.completions.create(model="m", messages=HELLO).choices
        assert gateway.rows()[0]["generated_tokens"] == 400
