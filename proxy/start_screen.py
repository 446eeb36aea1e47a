"""The one screen that a successful start ends with."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxy.probe import get_json
from proxy.seeding import DEMO_USD, FirstRun
from proxy.settings import Settings
from proxy.supervisor import Plan


async def start_screen(plan: Plan, first_run: FirstRun, took_s: float) -> str:
    """Plain text, wide lines left alone so that they can be copied."""
    settings = plan.settings
    host, port = plan.address
    root = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    weights = await _weights(plan)
    rows = [("base_url", f"{root}/v1")]
    if first_run.demo_key is not None:
        zone = f", its days and months in {first_run.demo_timezone}" if first_run.demo_timezone else ""
        rows.append(("key", f"{first_run.demo_key}   (team demo, topped up with {DEMO_USD} USD{zone})"))
    else:
        rows.append(("key", 'make one: tallygate team create "Web shop", then tallygate key create --team "Web shop"'))
    if first_run.admin_token is not None:
        rows.append(("admin token", f"{first_run.admin_token}   (shown this once: keep it)"))
    for name in settings.models:
        rows += _model_rows(settings, name, weights)
        price = first_run.prices.charged.get(name)
        rows.append(("price", price or f"none: `{_command()} price publish {name}`, until then requests are refused"))
    lines = ["", f"TallyGate {importlib.metadata.version('tallygate')} is serving ({took_s:.1f} s)", ""]
    lines += [f"  {label:<12} {text}" for label, text in rows]
    lines += ["", *_example(settings, root, first_run.demo_key or "sk-tg-..."), ""]
    lines += [f"  {label:<12} {text}" for label, text in _next(plan, root)]
    return "\n".join([*lines, "", "Ctrl-C stops it: running requests are finished first.", ""])


async def _weights(plan: Plan) -> dict[str, Any]:
    """What the backend says answers behind each name: {model: {"weights": …, "drafts": {name: …}}}."""
    if plan.backend_url is None:
        return {}
    _, body = await get_json(f"{plan.backend_url}/models")
    models = body.get("data", []) if isinstance(body, dict) else []
    return {item["id"]: item.get("tallygate") or {} for item in models if isinstance(item, dict) and "id" in item}


def _model_rows(settings: Settings, name: str, weights: dict[str, Any]) -> list[tuple[str, str]]:
    model = settings.models[name]
    answers = []
    for deployment in model.deployments:
        served = deployment.model or name
        what = weights.get(served, {}).get("weights") if deployment.to == "backend" else f"{deployment.to}'s {served}"
        share = f"{deployment.weight}x " if len(model.deployments) > 1 else ""
        answers.append(share + str(what or f"{deployment.to}'s {served}"))
    rows = [("model", f"{name}, answered by {', '.join(answers)}")]
    if model.drafts:
        known: dict[str, Any] = next(
            (weights[d.model or name] for d in model.deployments if (d.model or name) in weights), {}
        )
        real = known.get("drafts") or {}
        rows.append(("drafts", _drafts(model.drafts, real)))
    return rows


def _drafts(names: Sequence[str], real: dict[str, Any]) -> str:
    """Names that mean the same draft stand together, and what it is once."""
    behind: dict[str, list[str]] = {}
    for name in names:
        behind.setdefault(str(real.get(name, "")), []).append(name)
    groups = []
    for what, same in behind.items():
        several = "one draft under each name: " if len(same) > 1 else ""
        groups.append(", ".join(same) + (f" ({several}{what})" if what else ""))
    return "; ".join(groups)


def _example(settings: Settings, root: str, key: str) -> list[str]:
    model = next(iter(settings.models), "MODEL")
    asked = '[{"role": "user", "content": "Say hello."}]'
    body = f'{{"model": "{model}", "messages": {asked}, "max_tokens": 32, "temperature": 0}}'
    head = f"  curl {root}/v1/chat/completions -H 'Authorization: Bearer {key}'"
    return [f"{head} -H 'Content-Type: application/json' -d '{body}'"]


def _command() -> str:
    """How this shell reaches the command line."""
    if shutil.which("tallygate"):
        return "tallygate"
    installed = Path(sys.executable).parent / "tallygate"
    return str(installed.relative_to(Path.cwd()) if installed.is_relative_to(Path.cwd()) else installed)


def _next(plan: Plan, root: str) -> list[tuple[str, str]]:
    settings = plan.settings
    command = _command()
    here = settings.base_dir == Path.cwd()
    options = "" if here else f" --data-dir {settings.base_dir}"
    options += f" --config {settings.source}" if plan.configured else ""
    return [
        ("usage", f"{command} usage{options}"),
        ("proof", f"{command} verify{options}"),
        ("admin API", f"{root}/admin/v1/openapi.json"),
        ("health", f"{root}/health/ready and {root}/metrics"),
        ("data, logs", f"{settings.data_dir}, {settings.data_dir / 'logs'}"),
    ]
