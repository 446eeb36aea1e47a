"""The OpenAI dialect as far as the engine speaks it: request bodies in, checked; errors out."""

from __future__ import annotations

import re
import secrets
from typing import Any, Literal, TypeVar

import msgspec

from backend.errors import BadRequest
from backend.sampling import SamplingParams

_MAX_CHOICES = 16
_MAX_STOPS = 4
_MAX_TOP_LOGPROBS = 20
_SEED_STEP = 0x1D8E4E27C47D124F  # keeps the choices of one request apart; the first choice has the seed itself


_Body = TypeVar("_Body", bound="SamplingBody")
_Number = TypeVar("_Number", int, float)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class SamplingBody(msgspec.Struct, frozen=True):
    """What chat and plain completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    user: str | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


def decode_chat(body: bytes) -> ChatBody:
    """Raises BadRequest naming the field."""
    found = _decode(body, ChatBody)
    if not found.messages:
        raise BadRequest("`messages` must hold at least one message", param="messages")
    if found.top_logprobs and not found.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    _between(found.top_logprobs, "top_logprobs", 0, _MAX_TOP_LOGPROBS)
    return found


def decode_completion(body: bytes) -> CompletionBody:
    """Raises BadRequest naming the field."""
    found = _decode(body, CompletionBody)
    if found.suffix:
        raise BadRequest("`suffix` is not supported: this model continues a text and fills no gaps", param="suffix")
    if found.best_of not in (None, found.n or 1):
        raise BadRequest("`best_of` may only equal `n`: every generated answer is returned", param="best_of")
    if found.echo and found.logprobs is not None:
        raise BadRequest("`echo` is not supported together with `logprobs`; leave one out", param="echo")
    _between(found.logprobs, "logprobs", 0, _MAX_TOP_LOGPROBS)
    return found


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), param=_field_of(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def _field_of(message: str) -> str | None:
    """The field that msgspec's message complains about: `messages[0].role`."""
    path = re.search(r"at `\$\.?(.*?)`", message)
    missing = re.search(r"missing required field `(.*?)`", message)
    parts = [found.group(1) for found in (path, missing) if found and found.group(1)]
    return ".".join(parts).replace("[...]", "") or None


def choices_of(body: SamplingBody) -> int:
    return _between(body.n, "n", 1, _MAX_CHOICES) or 1


def max_tokens_of(body: SamplingBody, default: int) -> int:
    """How many tokens may be generated; `max_completion_tokens` wins over its older name."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = getattr(body, name, None)
        if value is not None:
            if value < 1:
                raise BadRequest(f"`{name}` must be at least 1, not {value}", param=name)
            return int(value)
    return default


def stops_of(body: SamplingBody) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > _MAX_STOPS:
        raise BadRequest(f"`stop` takes up to {_MAX_STOPS} strings, not {len(stops)}", param="stop")
    if not all(stops):
        raise BadRequest("`stop` may not hold an empty string", param="stop")
    return stops


def sampling_of(body: SamplingBody, vocabulary: int, choice: int, fallback_seed: int) -> SamplingParams:
    """Checked sampling parameters of one choice; requests without a seed use `fallback_seed`."""
    seed = body.seed if body.seed is not None else fallback_seed
    top_k = _between(body.top_k, "top_k", -1, None) or 0
    repetition = body.repetition_penalty
    if repetition is not None and not 0 < repetition <= 10:
        raise BadRequest("`repetition_penalty` must be above 0 and at most 10", param="repetition_penalty")
    top_p = _between(body.top_p, "top_p", 0, 1)
    return SamplingParams(
        temperature=_or(_between(body.temperature, "temperature", 0, 2), 1.0),
        top_k=max(0, top_k),
        top_p=_or(top_p, 1.0),
        min_p=_or(_between(body.min_p, "min_p", 0, 1), 0.0),
        presence_penalty=_or(_between(body.presence_penalty, "presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(_between(body.frequency_penalty, "frequency_penalty", -2, 2), 0.0),
        repetition_penalty=_or(repetition, 1.0),
        logit_bias=_bias_of(body, vocabulary),
        seed=_signed(seed + choice * _SEED_STEP),
    )


def fresh_seed() -> int:
    """A seed for a request that names none; no two requests share their noise."""
    return secrets.randbits(63)


def _bias_of(body: SamplingBody, vocabulary: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, bias in (body.logit_bias or {}).items():
        if not re.fullmatch(r"\d{1,9}", name) or int(name) >= vocabulary:
            raise BadRequest(
                f"`logit_bias` names token {name!r}; this model's tokens are 0 to {vocabulary - 1}", param="logit_bias"
            )
        _between(bias, "logit_bias", -100, 100)
        pairs.append((int(name), bias))
    return tuple(pairs)


def _between(value: _Number | None, name: str, low: float, high: float | None) -> _Number | None:
    if value is not None and (not value >= low or (high is not None and not value <= high)):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise BadRequest(f"`{name}` must be {wanted}, not {value}", param=name)
    return value


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _signed(seed: int) -> int:
    """Any integer as a signed 64-bit one."""
    return (seed + 2**63) % 2**64 - 2**63


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text parts joined, `developer` called `system`."""
    plain: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise BadRequest(
                        f"this model reads text only; a part has type {part.get('type')!r}",
                        param=f"messages[{at}].content",
                    )
            content = "".join(part["text"] for part in content)
        if content is None and message.role not in ("assistant",):
            raise BadRequest("`content` is missing", param=f"messages[{at}].content")
        entry: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content or "",
        }
        for name in ("name", "tool_calls", "tool_call_id"):
            if getattr(message, name) is not None:
                entry[name] = getattr(message, name)
        plain.append(entry)
    return plain


def error_body(message: str, type: str, code: str | None, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": type, "param": param, "code": code}})
