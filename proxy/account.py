"""What a key may ask about itself: its models, its use, its team's balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ledger import accounts
from ledger.money import format_amount
from policies.access import Principal, check_access
from proxy.auth import bearer
from proxy.ids import now_ms
from proxy.openai.errors import model_not_found
from proxy.worker import Worker


def account_routes(worker: Worker, prefix: str) -> list[Route]:
    async def caller(request: Request) -> Principal:
        """Raises ApiError, Refusal."""
        authorization = request.headers.get("authorization")
        principal = await worker.keys().principal(bearer(authorization.encode("latin-1") if authorization else None))
        address = request.client.host if request.client else None
        check_access(replace(principal, models=None, end_user_required=False), "", address, None, now_ms())
        return principal

    async def list_models(request: Request) -> Response:
        return _json({"object": "list", "data": worker.catalogue.models(await caller(request))})

    async def one_model(request: Request) -> Response:
        name = request.path_params["model"]
        model = worker.catalogue.model(name, await caller(request))
        if model is None:
            raise model_not_found(name)
        return _json(model)

    async def balance(request: Request) -> Response:
        principal = await caller(request)
        async with worker.database().read() as c:
            money = await accounts.balance(c, principal.team_id, now_ms())
        amounts = ("prepaid", "granted", "credit_limit", "credit_used", "held", "available")
        body: dict[str, Any] = {"team_id": money.team_id, "currency": money.currency}
        return _json(body | {name: format_amount(getattr(money, f"{name}_pico")) for name in amounts})

    return [
        Route(f"{prefix}/models", list_models),
        Route(f"{prefix}/models/{{model:path}}", one_model),
        Route(f"{prefix}/balance", balance),
    ]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
