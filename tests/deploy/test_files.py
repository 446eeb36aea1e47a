"""Promises about docker/: what these files say exists, and is what the code takes. No Docker is needed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.material import (
    DOCKER,
    GATEWAYS,
    ROOT,
    Instruction,
    check_backend,
    check_tallygate,
    compose,
    containers,
    dockerfile,
    documents,
    environment,
    last_stage,
    nginx,
    pods,
    secrets,
    settings_of,
    the,
)

OURS = ["Dockerfile", "Dockerfile.backend"]
CONFIGURATIONS = [
    DOCKER / "tallygate.yaml",
    DOCKER / "kubernetes" / "tallygate.yaml",
    DOCKER / "engines" / "tallygate.yaml",
]


def is_pinned(image: str) -> bool:
    _, _, tag = image.rpartition("/")[2].partition(":")
    return bool(re.search(r"\d", tag))


# The files read


@pytest.mark.parametrize("path", sorted(DOCKER.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DOCKER)))
def test_every_yaml_file_reads(path: Path) -> None:
    assert documents(path)


def test_the_balancer_configuration_reads() -> None:
    assert [block.name for block in nginx(DOCKER / "nginx.conf").inside][-1] == "http"


@pytest.mark.parametrize("broken", ["http { a 1 }", "http { a 1;", "a 1; }", "; a;"])
def test_a_broken_balancer_configuration_does_not_read(broken: str, tmp_path: Path) -> None:
    (tmp_path / "nginx.conf").write_text(broken)
    with pytest.raises(ValueError, match=r"misplaced|unfinished"):
        nginx(tmp_path / "nginx.conf")


# Images


@pytest.mark.parametrize("name", OURS)
def test_an_image_runs_as_an_ordinary_user_and_gets_its_signals(name: str) -> None:
    stage = last_stage(dockerfile(DOCKER / name))
    user = the("USER", stage).text.split(":")[0]
    assert int(user) > 0
    assert the("ENTRYPOINT", stage).words, "a shell would swallow SIGTERM"
    assert the("CMD", stage).words
    assert f"--owner {user}" in the("RUN", stage).text


@pytest.mark.parametrize("name", OURS)
def test_an_image_builds_in_stages_from_pinned_parts(name: str) -> None:
    instructions = dockerfile(DOCKER / name)
    stages = [item.text.split()[0] for item in instructions if item.name == "FROM"]
    assert len(stages) == 2
    assert len(set(stages)) == 1, "a virtual environment moves only between equal interpreters"
    assert all(is_pinned(image) for image in stages)
    installs = [
        item.text for item in instructions if item.name == "RUN" and "install" in item.text and "pip" in item.text
    ]
    constrained = environment(instructions).get("PIP_CONSTRAINT") == "/src/constraints.txt"
    for text in installs:
        assert constrained or "--constraint constraints.txt" in text or "^torch==" in text, text


def test_the_gateway_image_has_no_torch() -> None:
    installs = [
        item.text for item in dockerfile(DOCKER / "Dockerfile") if item.name == "RUN" and "install" in item.text
    ]
    assert not any("torch" in text or "[" in text.replace('["', "") for text in installs), "no extra is installed"


@pytest.mark.parametrize("name", OURS)
def test_what_an_image_copies_is_there_and_let_into_the_build(name: str) -> None:
    allowed = {line[1:] for line in (DOCKER / f"{name}.dockerignore").read_text().splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for item in dockerfile(DOCKER / name):
        if item.name == "COPY" and "/opt" not in item.text:
            copied |= set(item.text.split()[:-1])
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


@pytest.mark.parametrize(("name", "path"), [("Dockerfile", "/health/ready"), ("Dockerfile.backend", "/health")])
def test_an_image_asks_its_own_port_how_it_is(name: str, path: str) -> None:
    stage = last_stage(dockerfile(DOCKER / name))
    words = the("HEALTHCHECK", stage).words
    assert words is not None
    assert words[0] == "python", "a slim image has no curl"
    compile(words[2], "healthcheck", "exec")
    assert f"http://127.0.0.1:{the('EXPOSE', stage).text}{path}" in words[2]


def test_the_variables_of_the_gateway_image_exist() -> None:
    options = (ROOT / "proxy" / "commands" / "options.py").read_text()
    ours = [
        name for name in environment(last_stage(dockerfile(DOCKER / "Dockerfile"))) if name.startswith("TALLYGATE_")
    ]
    assert sorted(ours) == ["TALLYGATE_CONFIG", "TALLYGATE_DATA_DIR"]
    assert all(f'envvar="{name}"' in options for name in ours)


def test_every_image_of_others_is_pinned_by_a_tag() -> None:
    images = [service["image"] for service in compose()["services"].values()]
    tags = {
        f"{item['name']}:{item['newTag']}"
        for item in documents(DOCKER / "kubernetes" / "kustomization.yaml")[0]["images"]
    }
    images += [
        item["image"] for _, pod in pods() for item in containers(pod) if not item["image"].startswith("tallygate/")
    ]
    assert {image for image in images if not is_pinned(image)} == set()
    ours = {item["image"] for _, pod in pods() for item in containers(pod) if item["image"].startswith("tallygate/")}
    assert ours == {tag.partition(":")[0] for tag in tags}


# Command lines


def command_of(service: dict[str, Any], stage: list[Instruction]) -> list[str]:
    words = the("ENTRYPOINT", stage).words
    assert words is not None
    return [*words, *(service.get("command") or the("CMD", stage).words or [])]


@pytest.mark.parametrize("name", OURS)
def test_the_default_command_of_an_image_exists(name: str) -> None:
    check_command(command_of({}, last_stage(dockerfile(DOCKER / name))))


@pytest.mark.parametrize("service", [*GATEWAYS, "backend"])
def test_every_command_of_compose_exists(service: str) -> None:
    definition = compose()["services"][service]
    stage = last_stage(dockerfile(ROOT / definition["build"]["dockerfile"]))
    check_command(command_of(definition, stage))


def test_every_command_of_the_manifests_exists() -> None:
    seen = 0
    for _, pod in pods():
        for container in containers(pod):
            image = container["image"]
            if image.startswith("tallygate/"):
                name = "Dockerfile.backend" if image.endswith("backend") else "Dockerfile"
                entry = the("ENTRYPOINT", last_stage(dockerfile(DOCKER / name))).words or []
                check_command([*entry, *container["args"]])
                seen += 1
    assert seen == 3


def check_command(words: list[str]) -> None:
    if words[:3] == ["python", "-m", "backend"]:
        check_backend(words[3:])
    else:
        assert words[0] == "tallygate"
        check_tallygate(words[1:])


@pytest.mark.parametrize(
    "words", [["gateway", "--slit", "0"], ["gateway", "--slot", "one"], ["start"], ["key", "spin"]]
)
def test_a_command_that_does_not_exist_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|integer"):
        check_tallygate(words)


# Configurations


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(DOCKER)))
def test_a_configuration_is_accepted(path: Path, tmp_path: Path) -> None:
    settings = settings_of(path, tmp_path)
    assert settings.models
    if settings.backend is not None:
        assert settings.backend.url is not None, "the engine has a container of its own"
        assert settings.storage.counters.startswith("redis://")
        assert settings.storage.database.startswith("postgresql://")
        assert settings.server.key_secret, "several hosts hash keys under one secret"
        assert settings.admin_token
        assert settings.server.host == "0.0.0.0"


def test_a_secret_is_never_written_into_a_configuration() -> None:
    for path in CONFIGURATIONS:
        for name, value in re.findall(
            r"^\s*(\w*(?:secret|token|api_key|database)):\s*(\S+)", path.read_text(), re.MULTILINE
        ):
            assert value.startswith(("env:", "file:")), f"{path.name}: {name}"


def test_what_a_configuration_reads_as_a_secret_is_given_to_its_containers() -> None:
    for name in GATEWAYS:
        given = {f"/run/secrets/{secret}" for secret in compose()["services"][name]["secrets"]}
        assert set(re.findall(r"file:(\S+)", (DOCKER / "tallygate.yaml").read_text())) == given
    text = (DOCKER / "kubernetes" / "tallygate.yaml").read_text()
    generated = documents(DOCKER / "kubernetes" / "kustomization.yaml")[0]["secretGenerator"][0]
    files = {f"/run/secrets/tallygate/{Path(name).name}" for name in generated["files"]}
    assert set(re.findall(r"file:(\S+)", text)) == files
    made = set(re.findall(r"^keep (\S+)", (DOCKER / "make-secrets.sh").read_text(), re.MULTILINE))
    assert {Path(name).name for name in generated["files"]} <= made
    assert set(compose()["secrets"]) == made


def test_secrets_are_made_once_and_lie_in_a_closed_directory(tmp_path: Path) -> None:
    first = {path.name: path.read_text() for path in secrets(tmp_path / "s").iterdir()}
    assert {path.name: path.read_text() for path in secrets(tmp_path / "s").iterdir()} == first
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert first["postgres-password"] in first["database-url"]
    assert len(set(first.values())) == len(first)
    assert len(first["key-secret"]) == 48
    assert "secrets/" in (DOCKER / ".gitignore").read_text().split()


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_the_engine_serves_what_the_gateways_route_to_it(where: str, tmp_path: Path) -> None:
    if where == "compose":
        settings = settings_of(DOCKER / "tallygate.yaml", tmp_path)
        engine = check_backend(compose()["services"]["backend"]["command"])
    else:
        settings = settings_of(DOCKER / "kubernetes" / "tallygate.yaml", tmp_path)
        engine = check_backend(containers(dict(pods())["backend"])[0]["args"])
    assert settings.backend is not None
    assert settings.backend.base_url == f"http://backend:{engine.port}/v1"
    assert settings.backend.max_batch == engine.max_batch
    drafts = {pair.partition("=")[0] for pair in engine.draft}
    for name, model in settings.models.items():
        for deployment in model.deployments:
            assert (deployment.model or name) in engine.served_model
        assert set(model.drafts) <= drafts
    assert engine.host == "0.0.0.0"


# Roles


def test_a_gateway_that_starts_alone_publishes_the_configured_prices(tmp_path: Path) -> None:
    def tallygate(words: str) -> str:
        argv = [sys.executable, "-m", "proxy.cli", *shlex.split(words), "--data-dir", str(tmp_path)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TALLYGATE_")}
        return subprocess.run(
            argv, cwd=ROOT, env=environ, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    tallygate("migrate")
    tallygate("migrate")
    assert tallygate("price list").count("deepseek-v3.2") == 1
