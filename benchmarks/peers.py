"""Two other gateways, from their packages, in environments of their own under `build/peers`; same core, same load.

LiteLLM runs as its proxy with a configuration file and nothing beside it: no database, no budgets. Portkey is
stateless. What is not installed yet is fetched; a peer that cannot be had is left out, and the report says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.processes import GATEWAY_CORE, Process, free_port
from benchmarks.subjects import MODEL, Subject

LITELLM = "litellm[proxy]==1.108.7"
PORTKEY = "@portkey-ai/gateway@1.15.2"
HOME = Path(__file__).resolve().parent.parent / "build" / "peers"
READY_WITHIN_S = 120.0


class NoPeer(Exception):
    """Why a peer takes no part."""


@contextmanager
def litellm(folder: Path, upstream_port: int) -> Iterator[Subject]:
    """Raises NoPeer."""
    program = HOME / "litellm" / "bin" / "litellm"
    if not program.exists():
        _install([sys.executable, "-m", "venv", str(HOME / "litellm")])
        _install([str(HOME / "litellm" / "bin" / "pip"), "install", "--quiet", LITELLM])
    config = folder / "litellm.yaml"
    place = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": place}]}))
    port = free_port()
    arguments = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # no authentication: that is faster
    }
    process = Process(
        [*arguments, "--num_workers", "1"],
        GATEWAY_CORE,
        folder / "litellm.log",
        port,
        program=str(program),
        environment=environment,
        ready_within_s=READY_WITHIN_S,
    )
    with process:
        yield Subject("LiteLLM 1.108.7", port, "none", process, _facts(process), is_peer=True)


@contextmanager
def portkey(folder: Path, upstream_port: int) -> Iterator[Subject]:
    """Raises NoPeer."""
    node = shutil.which("node")
    if node is None:
        raise NoPeer("Portkey needs node, which is not on the PATH")
    home = HOME / "portkey"
    server = home / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    if not server.exists():
        home.mkdir(parents=True, exist_ok=True)
        _install(["npm", "install", "--prefix", str(home), "--no-audit", "--no-fund", PORTKEY])
    port = free_port()
    process = Process(
        [str(server), f"--port={port}", "--headless"],
        GATEWAY_CORE,
        folder / "portkey.log",
        port,
        program=node,
        ready_within_s=READY_WITHIN_S,
    )
    headers = ("x-portkey-provider: openai", f"x-portkey-custom-host: http://127.0.0.1:{upstream_port}/v1")
    with process:
        yield Subject("Portkey 1.15.2", port, "none", process, _facts(process), headers=headers, is_peer=True)


def _facts(process: Process) -> dict[str, float]:
    return {"ready_s": round(process.ready_s, 2), "memory_mb": round(process.memory_mb())}


def _install(command: Sequence[str]) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPeer(f"`{' '.join(command)}`: {error}") from error
    if done.returncode:
        raise NoPeer(f"`{' '.join(command)}`: exit {done.returncode}: {done.stderr.strip()[-300:]}")
