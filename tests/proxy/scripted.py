"""An upstream that answers each request with the bytes it was told to, and a client that sends any bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Self

SLICE = 65_536


@dataclass(frozen=True)
class Script:
    """What comes back: packets, each after a pause, then the end. stays: it keeps the connection open and says nothing
    more."""

    packets: tuple[bytes, ...]
    resets: bool = False
    stays: bool = False
    pause_s: float = 0.0


class ScriptedUpstream:
    """One thread a connection; `script` is what the next requests meet."""

    def __init__(self) -> None:
        self.script = Script(())
        self.received: list[bytes] = []
        """The requests so far, head and body."""
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.base_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        """One exchange; the connection is not kept, so that each answer stands alone."""
        try:
            with peer:
                self.received.append(_read_request(peer))
                script = self.script
                for packet in script.packets:
                    time.sleep(script.pause_s)
                    peer.sendall(packet)
                if script.stays:
                    peer.settimeout(5)
                    peer.recv(1)
                if script.resets:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return


def _read_request(peer: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = peer.recv(SLICE)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    length = next((int(value) for name, _, value in lines if name == b"content-length"), 0)
    while len(body) < length and (part := peer.recv(SLICE)):
        body += part
    return head + b"\r\n\r\n" + body


def post(port: int, path: str, key: str, body: bytes, headers: bytes = b"", timeout_s: float = 30) -> tuple[int, bytes]:
    """(status, raw body) of one request. Raises TimeoutError when it hangs."""
    bearer = f"authorization: Bearer {key}\r\n".encode()
    status, _, answer = exchange(port, path, body, bearer + headers, timeout_s)
    return status, answer


def exchange(
    port: int, path: str, body: bytes, headers: bytes, timeout_s: float = 30
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of one request on a connection of its own. Raises TimeoutError when it hangs."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as peer:
        with contextlib.suppress(ConnectionError):  # it may answer, and close, before it has read all
            peer.sendall(head + headers + b"content-type: application/json\r\n\r\n" + body)
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := peer.recv(SLICE):
                data += part
    section, _, rest = data.partition(b"\r\n\r\n")
    status, *lines = section.decode("latin-1").split("\r\n")
    found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), found, _joined(rest) if "transfer-encoding" in found else rest


def _joined(body: bytes) -> bytes:
    """A chunked body without its chunks."""
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return out
