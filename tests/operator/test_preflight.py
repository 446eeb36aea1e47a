"""Promises about what is checked and made on disk before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.preflight import StartRefused, check_backend_installed, check_directories, check_room
from proxy.settings import Settings, load_settings
from tests.operator.test_serve import refused
from tests.services import free_port


def test_what_the_ledger_keeps_is_for_its_own_user_alone(tmp_path: Path) -> None:
    check_directories(load_settings(None, tmp_path, environ={}))
    for made in ("data", "data/journal"):
        assert (tmp_path / made).stat().st_mode & 0o077 == 0


def with_model(folder: Path, section: str, *files: str) -> Path:
    """A configuration whose `backend.target` or only draft is a directory of these files."""
    model = folder / "model"
    model.mkdir()
    for name in files:
        (model / name).write_text("{}")
    config = folder / "tallygate.yaml"
    backend = {"target": str(model)} if section == "target" else {"target": "demo", "drafts": {"x": str(model)}}
    models = {"m": {"deployments": [{"to": "backend"}]}}
    config.write_text(json.dumps({"backend": backend, "models": models}))
    return config


def settings_of(folder: Path, section: str, *files: str) -> Settings:
    return load_settings(with_model(folder, section, *files), folder, environ={})


@pytest.mark.parametrize("section", ["target", "drafts.x"])
@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([], "no model at {model}: it must be a directory with a config.json"),
        (["config.json", "tokenizer.json"], "the model at {model} has no weights (*.safetensors): copy it in whole"),
        (["config.json", "model.safetensors"], "the model at {model} has no tokenizer (tokenizer.json): copy it"),
        (["config.json"], "has no weights (*.safetensors) and no tokenizer (tokenizer.json): copy it in whole"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_before_anything_starts(
    tmp_path: Path, section: str, files: list[str], why: str
) -> None:
    with pytest.raises(StartRefused) as refusal:
        check_backend_installed(settings_of(tmp_path, section, *files))
    line = str(refusal.value)
    assert line.startswith(f"backend.{section}: ")
    assert why.format(model=tmp_path / "model") in line
    assert "\n" not in line


def test_a_model_without_one_of_its_shards_is_refused(tmp_path: Path) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    settings = settings_of(tmp_path, "target", "config.json", "tokenizer.model", shards[0])
    index = {"weight_map": {f"layer.{n}": shard for n, shard in enumerate(shards)}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartRefused, match=f"lacks {shards[1]}, which its index names: copy it in whole"):
        check_backend_installed(settings)
    (tmp_path / "model" / shards[1]).write_text("{}")
    check_backend_installed(settings)


def test_a_start_says_what_a_model_lacks_and_starts_nothing(tmp_path: Path) -> None:
    config = with_model(tmp_path, "target", "config.json", "tokenizer.json")
    line = refused(tmp_path, "--config", str(config), "--port", str(free_port()))
    assert line == (
        f"tallygate: backend.target: the model at {tmp_path / 'model'} has no weights (*.safetensors): copy it in whole"
    )


def test_a_start_needs_room_for_its_journal(tmp_path: Path) -> None:
    settings = load_settings(None, tmp_path, environ={})
    check_directories(settings)
    check_room(settings, lambda path: 128 << 20)
    with pytest.raises(StartRefused) as refusal:
        check_room(settings, lambda path: (128 << 20) - 1)
    assert str(refusal.value) == (
        f"the disk of {tmp_path / 'data/journal'} has 127 MiB free and a start needs 128 MiB: free some, or set "
        "storage.journal_dir to another local disk"
    )
    check_room(settings)
