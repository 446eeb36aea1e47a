"""Promises about docs/operations.md: every command in it is one, every metric in it is measured."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from proxy.exposition import text_of
from proxy.settings import load_settings
from proxy.worker import Worker
from tests.deploy.material import (
    DOCKER,
    OPERATIONS,
    ROOT,
    check_backend,
    check_tallygate,
    commands_in,
    compose,
    documents,
    manifests,
)

METRIC = re.compile(r"\btallygate_(?!backend_)[a-z_]+\b")
BACKEND_METRIC = re.compile(r"\btallygate_backend_[a-z_]+\b")
DOCUMENTS = [OPERATIONS, ROOT / "README.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_every_command_of_a_document_exists(document: Path) -> None:
    checked = 0
    for words in commands_in(document):
        program = words[0].rpartition("/")[2]
        if program == "tallygate":
            check_tallygate(words[1:])
        elif words[:3] == ["python", "-m", "backend"]:
            check_backend(words[3:])
        elif words[:2] == ["docker", "compose"]:
            check_compose(words[2:])
        elif program == "sh":
            assert (ROOT / words[1]).is_file()
        elif words[:2] == ["kubectl", "apply"]:
            assert (ROOT / words[3] / "kustomization.yaml").is_file()
        else:
            continue
        checked += 1
    assert checked > 3


def check_compose(words: list[str]) -> None:
    """Its files exist, and so do its services; what runs in them is checked too."""
    while words[0] == "-f":
        assert (ROOT / words[1]).is_file()
        words = words[2:]
    services = set(compose()["services"])
    named = [word for word in words[1:] if not word.startswith("-")]
    if words[0] == "exec":
        assert words[1] in services
        if words[2] == "tallygate":
            check_tallygate(words[3:])
    else:
        assert words[0] == "up"
        assert set(named) <= services


def test_every_metric_of_the_gateway_that_is_named_is_measured_and_none_is_left_out(tmp_path: Path) -> None:
    snapshot = Worker(load_settings(None, tmp_path), 0).metrics.snapshot()
    text = text_of([snapshot], {"gateway-0": snapshot}).decode()
    measured = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert set(METRIC.findall(OPERATIONS.read_text())) == measured


def test_every_metric_of_the_backend_that_is_named_is_measured() -> None:
    """Its collector needs an engine, and so torch; its names stand in its source."""
    tree = ast.parse((ROOT / "backend" / "metrics.py").read_text())
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    known = {word.removeprefix("tallygate_backend_") for word in words}
    named = {name.removeprefix("tallygate_backend_") for name in BACKEND_METRIC.findall(OPERATIONS.read_text())}
    assert {name for name in named if name not in known and name.removesuffix("_total") not in known} == set()
    assert len(named) > 15


def test_the_rules_of_the_document_read() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", OPERATIONS.read_text(), re.DOTALL)
    assert [group["name"] for group in yaml.safe_load(block)["groups"]] == ["acceptance"]


def test_flags_of_other_engines_are_the_same_in_document_and_manifests() -> None:
    text = OPERATIONS.read_text()
    engines = [item for item in manifests() if item["kind"] == "Deployment" and item["metadata"]["name"] != "backend"]
    for engine in engines:
        arguments = engine["spec"]["template"]["spec"]["containers"][0]["args"]
        flags = {word.partition("=")[0] for word in arguments}
        for flag in flags:
            if "speculative" in flag or "enable" in flag:
                assert flag in text, flag
    assert len(engines) == len(documents(DOCKER / "engines" / "tallygate.yaml")[0]["upstreams"])


def test_every_file_that_the_document_names_exists() -> None:
    for name in re.findall(r"`((?:docker|docs)/[^`]+)`", OPERATIONS.read_text()):
        assert (ROOT / name).exists(), name
