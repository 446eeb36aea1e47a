"""From a name in the configuration to weights in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.bundled import WEIGHTS, bundled_target
from backend.errors import DraftNotSupported, WeightsNotFound

if TYPE_CHECKING:
    import torch

    from backend.text import Tokenizer

BUNDLED_DRAFT = Path(__file__).parent / "demo" / "weights"
BUNDLED_DRAFT_LABEL = "SmolLM2-135M-Instruct recurrent head"
BUNDLED_DRAFT_ACCEPTANCE = (0.52, 0.61)  # expected of the first drafted token and of later ones; see its model card


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


def weights_label(name: str) -> str:
    """What people are told about where answers really come from."""
    return f"{WEIGHTS} (bundled)" if name == "demo" else name


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a usable GPU, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise WeightsNotFound("no usable CUDA device: choose --device cpu, or install a CUDA build of torch")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it, else float32."""
    import torch

    if name == "auto":
        fast = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        name = "bfloat16" if fast else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers causal language model in evaluation mode.

    Raises WeightsNotFound when the directory is damaged or incomplete: nothing is filled in at random.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=dtype, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # damaged files raise whatever their parser raises
        raise WeightsNotFound(f"{directory} cannot be read as a language model: {error}") from error
    missing = sorted(report["missing_keys"]) + sorted(map(str, report.get("mismatched_keys", ())))
    if missing:
        raise WeightsNotFound(f"{directory} is incomplete: no weights for {', '.join(missing[:3])}; fetch it again")
    return model.to(device).eval()


def load_tokenizer(directory: Path) -> Tokenizer:
    """Raises WeightsNotFound when the directory holds no usable tokenizer."""
    from transformers import AutoTokenizer

    from backend.text import Tokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except Exception as error:
        raise WeightsNotFound(f"{directory} holds no usable tokenizer: {error}") from error


def stop_tokens_of(directory: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, and those that the model's generation settings name."""
    stops = {tokenizer.eos_token} if tokenizer.eos_token is not None else set()
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            found = json.loads(file.read_text()).get("eos_token_id")
            stops.update(found if isinstance(found, list) else [found])
    return frozenset(token for token in stops if isinstance(token, int))


def common_vocabulary(target: dict[str, int], draft: dict[str, int], draft_name: str) -> int:
    """How many token ids mean the same in both vocabularies, from 0 on; padding at the end of either is ignored.

    Raises DraftNotSupported at the first id that means something else.
    """
    theirs = {token: piece for piece, token in draft.items()}
    ours = {token: piece for piece, token in target.items()}
    width = min(max(ours), max(theirs)) + 1
    for token in range(width):
        if ours.get(token) != theirs.get(token):
            raise DraftNotSupported(
                f"the draft {draft_name} has another tokenizer than the target: token {token} is "
                f"{theirs.get(token)!r} there and {ours.get(token)!r} in the target; choose a draft of the same family"
            )
    return width
