"""Runs the scenarios of one client and prints what it saw, as one JSON object: scenario → fields.

Imported by the programs beside it, which run in an environment of their own: standard library only.
"""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

BASE_URL = os.environ.get("BASE_URL", "")
ROOT_URL = BASE_URL.removesuffix("/v1")
API_KEY = os.environ.get("API_KEY", "")
IMAGE = os.environ.get("IMAGE", "")
BROKEN_MODEL = os.environ.get("BROKEN_MODEL", "")
"""Its streams break off. One for each client: a deployment rests after three of them."""
MESSAGES: Any = [{"role": "user", "content": "hi there"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
PICTURE: Any = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": IMAGE}}],
    }
]

Scenario = Callable[[], Any]


def run(*scenarios: Scenario) -> None:
    """A scenario's name is its function's; one that raises tells how instead."""
    asyncio.run(_run(scenarios))


async def _run(scenarios: tuple[Scenario, ...]) -> None:
    found: dict[str, Any] = {}
    for scenario in scenarios:
        try:
            seen = scenario()
            found[scenario.__name__] = await seen if isawaitable(seen) else seen
        except Exception:
            found[scenario.__name__] = {"failed": traceback.format_exc()}
    print(json.dumps(found))
