"""The OpenAPI 3.1 document, from the same endpoints and models that serve the requests."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from proxy.admin.endpoints import Endpoint

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {"400": "Wrongly asked", "401": "No or wrong token", "403": "The role may not", "503": "The ledger is away"}


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """A plain JSON value."""
    types = [kind for endpoint in endpoints for kind in _types(endpoint)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = iter(schemas)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schema_of, components)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "TallyGate admin API", "version": importlib.metadata.version("tallygate")},
        "servers": [{"url": "/admin/v1"}],
        "security": [{"adminToken": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": ERROR_SCHEMA},
            "securitySchemes": {"adminToken": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types(endpoint: Endpoint) -> Iterator[Any]:
    if endpoint.query is not None:
        yield endpoint.query
    if endpoint.body is not None:
        yield endpoint.body
    if _is_json(endpoint):
        yield from _answers(endpoint)


def _answers(endpoint: Endpoint) -> tuple[Any, ...]:
    if endpoint.answer is None:
        return ()
    return endpoint.answer if isinstance(endpoint.answer, tuple) else (endpoint.answer,)


def _is_json(endpoint: Endpoint) -> bool:
    return endpoint.media_types == ("application/json",)


def _operation(endpoint: Endpoint, schema_of: Iterator[dict[str, Any]], components: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if endpoint.query is not None:
        parameters += _query_parameters(_resolved(next(schema_of), components))
    if endpoint.writes:
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 255}})
        parameters.append({"name": "X-Audit-Reason", "in": "header", "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.path.split("/")[1].split(".")[0]],
        "parameters": parameters,
    }
    if endpoint.body is not None:
        content = {"application/json": {"schema": next(schema_of)}}
        operation["requestBody"] = {"required": not endpoint.body_optional, "content": content}
    answer: dict[str, Any] = {"description": "Done"}
    if not _is_json(endpoint):
        answer["content"] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in endpoint.media_types}
    elif _answers(endpoint):
        shapes = [next(schema_of) for _ in _answers(endpoint)]
        answer["content"] = {"application/json": {"schema": shapes[0] if len(shapes) == 1 else {"oneOf": shapes}}}
    error = {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}}
    errors = {status: {"description": text, "content": error} for status, text in _ERRORS.items()}
    operation["responses"] = {str(endpoint.status): answer, **errors}
    operation["x-roles"] = sorted(endpoint.roles)
    return operation


def _resolved(schema: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    found: dict[str, Any] = schema if reference is None else components[reference.rpartition("/")[2]]
    return found


def _query_parameters(schema: dict[str, Any]) -> list[dict[str, Any]]:
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]


def _operation_id(endpoint: Endpoint) -> str:
    words = [part.strip("{}").replace("-", "_") for part in re.split(r"[/.]", endpoint.path) if part]
    return "_".join([endpoint.method.lower(), *words])
