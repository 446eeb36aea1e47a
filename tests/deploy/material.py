"""Readers of the deployment files, each as small as what these files use of their formats."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer.main
import yaml

from backend.__main__ import _parser as backend_parser
from proxy.cli import build_cli
from proxy.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
JOURNALS = "/srv/tallygate/data"
GATEWAYS = ["gateway-a", "gateway-b"]
OPERATIONS = ROOT / "docs" / "operations.md"


@dataclass
class Instruction:
    """One instruction of a Dockerfile; `words` is its JSON form where it has one."""

    name: str
    text: str
    words: list[str] | None


def dockerfile(path: Path) -> list[Instruction]:
    """The instructions, continuation lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        name, _, rest = line.partition(" ")
        text = re.sub(r"^(--\S+\s+)+", "", " ".join(rest.split())) if name in ("HEALTHCHECK", "RUN", "COPY") else rest
        found.append(Instruction(name.upper(), text.strip(), _json_form(text.strip())))
    return found


def _json_form(text: str) -> list[str] | None:
    body = text.removeprefix("CMD ").strip()
    if not body.startswith("["):
        return None
    words: list[str] = json.loads(body)
    return words


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    start = max(i for i, item in enumerate(instructions) if item.name == "FROM")
    return instructions[start:]


def the(name: str, instructions: list[Instruction]) -> Instruction:
    """The one that counts: the last of this name."""
    return [item for item in instructions if item.name == name][-1]


def environment(instructions: list[Instruction]) -> dict[str, str]:
    words = [word for item in instructions if item.name == "ENV" for word in shlex.split(item.text)]
    return dict(word.split("=", 1) for word in words)


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes object."""
    return [
        item for path in sorted((DOCKER / "kubernetes").rglob("*.yaml")) for item in documents(path) if "kind" in item
    ]


def the_object(kind: str, name: str) -> dict[str, Any]:
    return next(item for item in manifests() if item["kind"] == kind and item["metadata"]["name"] == name)


def pods() -> list[tuple[str, dict[str, Any]]]:
    """(name of the workload, pod specification)."""
    workloads = [item for item in manifests() if item["kind"] in ("StatefulSet", "Deployment")]
    return [(item["metadata"]["name"], item["spec"]["template"]["spec"]) for item in workloads]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def compose() -> dict[str, Any]:
    return documents(DOCKER / "compose.yaml")[0]


@dataclass
class Block:
    """A directive of nginx.conf, with what is inside its braces."""

    name: str
    words: list[str]
    inside: list[Block] = field(default_factory=list)

    def find(self, name: str) -> Iterator[Block]:
        for item in self.inside:
            if item.name == name:
                yield item
            yield from item.find(name)

    def value(self, name: str) -> str:
        return next(self.find(name)).words[0]


def nginx(path: Path) -> Block:
    """Raises ValueError where braces or semicolons do not fit."""
    text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
    tokens = re.findall(r'"[^"]*"|[{};]|[^\s{};]+(?:\{[^\s}]*\})?', text)
    root = Block("", [])
    open_blocks, words = [root], []
    for token in tokens:
        if token not in ("{", "}", ";"):
            words.append(token.strip('"'))
            continue
        if token == "}":
            if words or len(open_blocks) == 1:
                raise ValueError(f"misplaced }} after {words}")
            open_blocks.pop()
            continue
        if not words:
            raise ValueError(f"misplaced {token}")
        block = Block(words[0], words[1:])
        open_blocks[-1].inside.append(block)
        if token == "{":
            open_blocks.append(block)
        words = []
    if words or len(open_blocks) != 1:
        raise ValueError(f"unfinished: {words or open_blocks[-1].name}")
    return root


def seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", text).groups()  # type: ignore[union-attr]
    return int(number) * {"ms": 0.001, "s": 1, "m": 60}[unit]


def check_tallygate(words: list[str]) -> None:
    """Parse `tallygate WORDS` as the command line itself does, without running it. Raises what it raises."""
    command: Any = typer.main.get_command(build_cli())
    context = command.make_context("tallygate", list(words[:1]), resilient_parsing=True)
    name, rest = words[0], list(words[1:])
    while True:
        command = command.get_command(context, name)
        assert command is not None, f"no such command: tallygate {' '.join(words)}"
        if not hasattr(command, "commands"):
            break
        context = command.make_context(name, rest[:1], parent=context, resilient_parsing=True)
        name, rest = rest[0], rest[1:]
    command.make_context(name, rest, parent=context)


def check_backend(words: list[str]) -> Any:
    """Parse `python -m backend WORDS`; unknown flags end the test."""
    return backend_parser().parse_args(words)


def secrets(directory: Path) -> Path:
    """What docker/make-secrets.sh makes, elsewhere."""
    subprocess.run(["sh", str(DOCKER / "make-secrets.sh"), str(directory)], check=True, timeout=30)
    return directory


def settings_of(path: Path, directory: Path) -> Settings:
    """A configuration of docker/ as a container reads it; only the place of the secrets is another one."""
    copy = directory / path.name
    copy.write_text(
        re.sub(r"file:/run/secrets(/tallygate)?/", f"file:{secrets(directory / 'secrets')}/", path.read_text())
    )
    return load_settings(copy, directory, environ={"ENGINE_API_KEY": "sk-engine"})


def argument(words: list[str], flag: str) -> str | None:
    """The value of `flag` in a command line, in either of its forms."""
    for i, word in enumerate(words):
        if word == flag:
            return words[i + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def commands_in(path: Path) -> list[list[str]]:
    """The lines of a document's shell blocks, cut into words; continuation lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(), flags=re.DOTALL)
    lines = re.sub(r"\\\n\s*", " ", "\n".join(blocks)).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]
