"""From a name in the configuration to weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backend.bundled import bundled_target
from backend.errors import WeightsNotFound


def resolve_weights(name: str, data_dir: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The model directory that `name` means: `demo` (bundled target), a directory, or a hub id `owner/name`.

    A hub id is read from the local hub cache, and downloaded when it is not there.
    Raises WeightsNotFound with what to do next.
    """
    if name == "demo":
        return bundled_target(data_dir, progress)
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise WeightsNotFound(f"{directory} is no model directory: it holds no config.json")
        return directory
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name, progress)
    raise WeightsNotFound(f"{name} is neither `demo`, nor a directory, nor a hub id like `owner/name`")


def _from_hub(name: str, progress: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except Exception:  # not in the cache: each hub version has its own exception for that
        progress(f"downloading {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        raise WeightsNotFound(f"{name} is not in the hub cache and could not be downloaded: {error}") from error
