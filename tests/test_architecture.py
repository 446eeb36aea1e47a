"""The arrows of the house: who may import whom, and what starts without what."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.services import ROOT

ROOMS = ("proxy", "backend", "ledger", "policies")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ImportError(f"{{name}} is forbidden here")

sys.meta_path.insert(0, Forbidden())
for room in {rooms}:
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        if not module.name.endswith("__main__") and ".versions" not in module.name:
            importlib.import_module(module.name)
print("fine")
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )


def test_import_contracts_hold() -> None:
    from importlinter import cli

    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_gateway_ledger_and_policies_need_no_torch() -> None:
    """Every module of theirs loads where torch and transformers do not exist."""
    code = IMPORT_EVERYTHING.format(
        forbidden=("torch", "transformers", "numpy", "gguf", "llguidance", "safetensors", "backend"),
        rooms=("policies", "ledger", "proxy"),
    )
    done = run("-c", code)
    assert done.stdout == "fine\n", done.stderr


def test_the_backend_loads_none_of_the_other_rooms() -> None:
    """`python -m backend --help`, in a process that forbids them."""
    code = (
        "import runpy, sys\n"
        "class Forbidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('proxy', 'ledger', 'policies'):\n"
        "            raise ImportError(name + ' is forbidden here')\n"
        "sys.meta_path.insert(0, Forbidden())\n"
        "sys.argv = ['backend', '--help']\n"
        "runpy.run_module('backend', run_name='__main__')\n"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--target" in done.stdout


def required(*extras: str) -> set[str]:
    """The packages that pyproject.toml names for the gateway, and for these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return {canonicalize_name(Requirement(line).name) for line in named}


def imported(room: str) -> set[str]:
    """The packages that a room's modules import, also inside functions; not where ImportError is caught at once."""
    names: set[str] = set()
    for path in Path(ROOT / room).rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        tried = [node for node in nodes if isinstance(node, ast.Try) and "ImportError" in map(caught, node.handlers)]
        optional = [inner for node in tried for statement in node.body for inner in ast.walk(statement)]
        for node in nodes:
            if node in optional:
                continue
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {*ROOMS}


def caught(handler: ast.ExceptHandler) -> str:
    return handler.type.id if isinstance(handler.type, ast.Name) else ""


def test_the_gateways_requirements_do_not_name_what_belongs_to_the_backend() -> None:
    assert not {"torch", "transformers", "numpy", "safetensors"} & required()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_is_required_for_it(room: str) -> None:
    """What only the tests install, or only another package brings along, is missing where somebody else installs us."""
    allowed = required("backend") if room == "backend" else required()
    found = packages_distributions()
    assert not {name for name in imported(room) if not {canonicalize_name(n) for n in found[name]} & allowed}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_have_no_drawers_for_odds_and_ends(room: str) -> None:
    names = {path.stem for path in Path(ROOT / room).rglob("*.py")}
    assert not names & {"utils", "util", "helpers", "helper", "manager", "common", "misc"}
