"""Secrets that TallyGate makes for itself on the first start and keeps in files that only its user can read."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from proxy.settings import Settings


def key_secret(settings: Settings) -> bytes:
    """The secret under which API keys are hashed: configured, or made once in `data/key-secret`.

    Raises OSError when the file can be neither read nor made.
    """
    if settings.server.key_secret is not None:
        return settings.server.key_secret.encode()
    return read_or_create(settings.data_dir / "key-secret", lambda: secrets.token_hex(32)).encode()


def has_key_secret(settings: Settings) -> bool:
    return settings.server.key_secret is not None or (settings.data_dir / "key-secret").exists()


def fingerprint(secret: bytes) -> str:
    """By which hosts recognise that they have the same secret; says nothing about it."""
    return hmac.digest(secret, b"tallygate key-secret fingerprint", "sha256")[:16].hex()


def read_or_create(path: Path, make: Callable[[], str]) -> str:
    """The text of `path`; when there is none, `make()`, written for this user alone. Safe among several processes."""
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_private(draft, make())
    try:
        os.link(draft, path)  # atomic, and fails when another process was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_text(encoding="ascii").strip()


def write_private(path: Path, text: str) -> None:
    """Write `text` durably into a file of mode 0600."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
