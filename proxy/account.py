"""What a key may ask about itself: its models, its use, its team's balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ledger import accounts, usage
from ledger.money import format_amount
from ledger.usage import UsageFilter
from policies.access import Principal, check_access
from proxy.admin.endpoints import Listing, Paging
from proxy.admin.input import describe, refuse_nul
from proxy.admin.times import Instant, parse_instant
from proxy.admin.usage import UsageAnswer, UsageSumAnswer
from proxy.asgi import client_of
from proxy.auth import bearer
from proxy.ids import now_ms
from proxy.openai.errors import model_not_found
from proxy.worker import Worker


class UsageQuery(Paging, frozen=True, kw_only=True, rename={"from_": "from"}):
    """scope: this key, or all keys of its team. Dates mean midnights in the team's zone."""

    scope: Literal["key", "team"] = "key"
    model: str | None = None
    end_user: str | None = None
    from_: Instant | None = None
    to: Instant | None = None
    group_by: str | None = None


class Account:
    """The endpoints that answer a key about itself."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/usage", self.usage),
            Route(f"{prefix}/models", self.list_models),
            Route(f"{prefix}/models/{{model:path}}", self.one_model),
            Route(f"{prefix}/balance", self.balance),
        ]

    async def list_models(self, request: Request) -> Response:
        return _json({"object": "list", "data": self._worker.catalogue.models(await self._caller(request))})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        model = self._worker.catalogue.model(name, await self._caller(request))
        if model is None:
            raise model_not_found(name)
        return _json(model)

    async def balance(self, request: Request) -> Response:
        principal = await self._caller(request)
        async with self._worker.database().read() as c:
            money = await accounts.balance(c, principal.team_id, now_ms())
        amounts = ("prepaid", "granted", "credit_limit", "credit_used", "held", "available")
        body: dict[str, Any] = {"team_id": money.team_id, "currency": money.currency}
        return _json(body | {name: format_amount(getattr(money, f"{name}_pico")) for name in amounts})

    async def usage(self, request: Request) -> Response:
        principal = await self._caller(request)
        query = _query(request)
        wanted = UsageFilter(
            team_id=principal.team_id,
            key_id=principal.key_id if query.scope == "key" else None,
            model=query.model,
            end_user=query.end_user,
            from_ms=parse_instant(query.from_, "from", principal.timezone),
            to_ms=parse_instant(query.to, "to", principal.timezone),
        )
        groups = [name.strip() for name in (query.group_by or "").split(",") if name.strip()]
        async with self._worker.database().read() as c:
            if groups:
                sums = await usage.sum_usage(c, wanted, groups, timezone=principal.timezone)
                return _json(Listing([_for_customer(UsageSumAnswer.of(one)) for one in sums]))
            rows = await usage.list_usage(c, wanted, cursor=query.cursor, limit=query.limit)
        return _json(Listing([_for_customer(UsageAnswer.of(row)) for row in rows.items], rows.next_cursor))

    async def _caller(self, request: Request) -> Principal:
        """Whose key this is, if it may be used at all. Raises ApiError, Refusal."""
        authorization = request.headers.get("authorization")
        token = bearer(authorization.encode("latin-1") if authorization else None)
        principal = await self._worker.keys().principal(token)
        address = client_of(request.scope, self._worker.trusted_proxies)
        check_access(replace(principal, models=None, end_user_required=False), "", address, None, now_ms())
        return principal


def _query(request: Request) -> UsageQuery:
    """Raises ApiError 400."""
    refuse_nul(request.query_params.values())
    try:
        return msgspec.convert(dict(request.query_params), UsageQuery, strict=False)
    except msgspec.ValidationError as error:
        raise describe(error, UsageQuery, "query parameter") from None


def _for_customer(answer: msgspec.Struct) -> dict[str, Any]:
    """Without what only the operator may know: what the provider charged."""
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    del fields["provider_cost_usd"]
    return fields


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
