"""Which configuration a data directory is served with: `serve` writes it down, the other commands go by it.

Without it a command that is not told the configuration would work on the bundled one's ledger, beside the real one.
"""

from __future__ import annotations

import os
from pathlib import Path

FILE = "data/config-path"


def record_config(base_dir: Path, config: Path | None) -> Path | None:
    """Write down what `serve` runs with here, None for the bundled configuration. Returns what stood there before."""
    file, before = base_dir / FILE, recorded_config(base_dir)
    if config is None:
        file.unlink(missing_ok=True)
    elif config != before:
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_bytes(os.fsencode(config) + b"\n")
        draft.replace(file)
    return before


def recorded_config(base_dir: Path) -> Path | None:
    """The configuration that `serve` last ran with here; None: the bundled one, or `serve` never did."""
    return _read(base_dir / FILE)


def _read(file: Path) -> Path | None:
    try:
        raw = file.read_bytes().removesuffix(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Path(os.fsdecode(raw)) if raw else None
