"""Query strings and bodies into typed values; what does not fit becomes a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from proxy.admin.endpoints import Endpoint, Strict
from proxy.openai.errors import ApiError, invalid

MAX_BODY_BYTES = 1024 * 1024

_AT = re.compile(r" - at `([^`]*)`$")
_REGEX = re.compile(r" matching regex .*$")
_UNKNOWN = re.compile(r"^Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"^Object missing required field `([^`]*)`")


def refuse_nul(texts: Iterable[str]) -> None:
    """Raises ApiError 400 for the one character that PostgreSQL keeps in no text."""
    if any("\0" in text for text in texts):
        raise invalid("no text may hold the character NUL")


def decode_query(endpoint: Endpoint, items: Iterable[tuple[str, str]]) -> Any:
    """The query as the endpoint's struct. Raises ApiError 400."""
    given: dict[str, str] = {}
    for name, value in items:
        if name in given:
            raise invalid(f"{name} is given twice", name)
        given[name] = value
    kind = endpoint.query
    if kind is None:
        if given:
            name = next(iter(given))
            raise invalid(f"unknown query parameter {name}; this path takes none", name)
        return None
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise describe(error, kind, "query parameter") from None


def decode_body(endpoint: Endpoint, raw: bytes) -> Any:
    """The JSON body as the endpoint's type. Raises ApiError 400."""
    if endpoint.body is None:
        if raw.strip() not in (b"", b"{}", b"null"):
            raise invalid("this path takes no body")
        return None
    if not raw.strip():
        if not endpoint.body_optional:
            raise invalid("a JSON body is needed")
        raw = b"{}"
    if b"\\u0000" in raw:
        refuse_nul(["\0"])
    try:
        return msgspec.json.decode(raw, type=endpoint.body)
    except msgspec.ValidationError as error:
        raise describe(error, endpoint.body, "field") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None


def describe(error: msgspec.ValidationError, kind: Any, noun: str) -> ApiError:
    """msgspec's complaint in our words: which field, and for unknown ones which are allowed."""
    text = str(error)
    place = _AT.search(text)
    path = "" if place is None else place[1].removeprefix("$").removeprefix(".")
    reason = _REGEX.sub("", _AT.sub("", text))
    for pattern, word in ((_UNKNOWN, "unknown"), (_MISSING, "missing")):
        found = pattern.match(reason)
        if found:
            name = f"{path}.{found[1]}" if path else found[1]
            allowed = _allowed(kind) if word == "unknown" and "." not in path else ""
            return invalid(f"{word} {noun} `{name}`{allowed}", name)
    reason = reason.replace("`", "") + _hint(kind, path)
    return invalid(f"{path}: {reason}" if path else reason, path or None)


def _fields(kind: Any) -> dict[str, Any]:
    """Name → type of the fields of a struct, or of the structs in a list."""
    if get_origin(kind) is list:
        kind = kind.__args__[0]
    if not (isinstance(kind, type) and issubclass(kind, Strict)):
        return {}
    return {item.encode_name: item.type for item in msgspec.structs.fields(kind)}


def _allowed(kind: Any) -> str:
    return "; allowed: " + ", ".join(_fields(kind)) if _fields(kind) else ""


def _hint(kind: Any, path: str) -> str:
    """What may stand there: the choices, or how it is written."""
    wanted = _fields(kind).get(re.sub(r"^\[[^\]]*\]\.", "", path))
    for option in get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,):
        if get_origin(option) is Literal:
            return "; use " + ", ".join(map(str, get_args(option)))
        for meta in getattr(option, "__metadata__", ()):
            if getattr(meta, "description", None):
                return f"; write {meta.description}"
    return ""
