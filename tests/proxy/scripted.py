"""An upstream that answers each request with the bytes it was told to, and a client that sends any bytes."""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass
from typing import Self

SLICE = 65_536


@dataclass(frozen=True)
class Script:
    """What comes back: packets, then the end. stays: it keeps the connection open and says nothing more."""

    packets: tuple[bytes, ...]
    resets: bool = False
    stays: bool = False


class ScriptedUpstream:
    """One thread a connection; `script` is what the next requests meet."""

    def __init__(self) -> None:
        self.script = Script(())
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
                _read_request(peer)
                script = self.script
                for packet in script.packets:
                    peer.sendall(packet)
                if script.stays:
                    peer.settimeout(5)
                    peer.recv(1)
                if script.resets:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return


def _read_request(peer: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = peer.recv(SLICE)
        if not part:
            return
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
    missing = next(int(value) for name, _, value in lines if name == b"content-length") - len(body)
    while missing > 0:
        missing -= len(peer.recv(SLICE)) or missing


def post(port: int, path: str, key: str, body: bytes, headers: bytes = b"", timeout_s: float = 10) -> tuple[int, bytes]:
    """(status, body) of one request on a connection of its own. Raises TimeoutError when it hangs."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as peer:
        peer.sendall(head.encode() + headers + b"\r\n" + body)
        data = b""
        while part := peer.recv(SLICE):
            data += part
    head_bytes, _, rest = data.partition(b"\r\n\r\n")
    return int(head_bytes.split(b" ", 2)[1]), rest
