"""Requests in OpenAI's shape: read as little as the gate needs, forward every other byte as it came.

A body is cut into its top-level fields once. What is forwarded is put together from those, so that a field named twice
cannot mean one thing to us and another to the upstream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from proxy.openai.errors import ApiError, invalid

Fields = dict[str, Raw]

MAX_CHOICES = 128
MAX_END_USER_CHARS = 512
BYTES_PER_ESTIMATED_TOKEN = 4
"""For limits: about what English has."""
BYTES_PER_BILLED_TOKEN = 6
"""For bills, where an upstream does not say: more than most texts have, so that nobody pays for more than was used."""
_TEMPLATE_TOKENS = 32
"""Room for what a chat template adds around a message: role names, separators, a default system prompt."""
_MEDIA_TOKENS = 4_096
"""What one inline image or sound may count as, whatever its size in bytes."""

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")

_cut = msgspec.json.Decoder(Fields)


@dataclass(slots=True)
class Call:
    """One request, as far as the gate must understand it."""

    model: str
    fields: Fields
    body_bytes: int
    streamed: bool
    include_usage: bool
    continuous_usage: bool
    max_output_tokens: int | None
    """Per choice; None when the client does not say."""
    limit_field: str
    """The field that a limit is written to."""
    choices: int
    end_user: str | None
    prompt_tokens_bound: int
    """Never fewer than the prompt can have: a token is at least one byte."""
    asked: Any = None
    """What a dialect that translates must remember of the request as it was written; `fields` is the translation."""

    @property
    def estimated_tokens(self) -> int:
        """What limits on tokens are charged at admission, corrected later: the prompt and all that may be generated."""
        return self.prompt_tokens_bound // BYTES_PER_ESTIMATED_TOKEN + (self.max_output_tokens or 0) * self.choices

    @property
    def least_prompt_tokens(self) -> int:
        """A cautious guess at the prompt, for what a crash leaves unknown."""
        return max(1, min(self.body_bytes, self.prompt_tokens_bound) // (2 * BYTES_PER_ESTIMATED_TOKEN))


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct):
    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    user: str | None = None


class ChatFields(_Common, kw_only=True):
    messages: list[Raw]
    max_completion_tokens: int | None = None


class CompletionFields(_Common, kw_only=True):
    prompt: str | list[Any] = ""
    best_of: int | None = None


class EmbeddingFields(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[Any]
    user: str | None = None


_chat = msgspec.json.Decoder(ChatFields)
_completion = msgspec.json.Decoder(CompletionFields)
_embedding = msgspec.json.Decoder(EmbeddingFields)


def parse_chat(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    fields, request = _read(body, _chat)
    if not request.messages:
        raise invalid("`messages` is empty: send at least one message.", "messages")
    newer = "max_completion_tokens" in fields and request.max_completion_tokens is not None
    limit_field = "max_completion_tokens" if newer else "max_tokens"
    limit = request.max_completion_tokens if newer else request.max_tokens
    return _call(fields, body, request, limit, limit_field, len(request.messages), request.n or 1)


def parse_completion(body: bytes) -> Call:
    """Raises ApiError 400 that names the field. Several prompts are several choices."""
    fields, request = _read(body, _completion)
    prompts = 1
    if isinstance(request.prompt, list) and request.prompt and not isinstance(request.prompt[0], int):
        prompts = len(request.prompt)
    choices = prompts * max(request.n or 1, request.best_of or 1)
    return _call(fields, body, request, request.max_tokens, "max_tokens", prompts, choices)


def parse_embedding(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    fields, request = _read(body, _embedding)
    return Call(
        request.model,
        fields,
        len(body),
        streamed=False,
        include_usage=False,
        continuous_usage=False,
        max_output_tokens=0,
        limit_field="",
        choices=0,
        end_user=_end_user(request.user),
        prompt_tokens_bound=prompt_tokens_bound(body, 1),
    )


def _call(
    fields: Fields, body: bytes, request: _Common, limit: int | None, limit_field: str, parts: int, choices: int
) -> Call:
    if limit is not None and limit < 1:
        raise invalid(f"`{limit_field}` must be at least 1, not {limit}.", limit_field)
    if not 1 <= choices <= MAX_CHOICES or (request.n is not None and request.n < 1):
        raise invalid(f"The number of choices must be from 1 to {MAX_CHOICES}.", "n")
    streamed = bool(request.stream)
    if request.stream_options is not None and not streamed:
        raise invalid("`stream_options` is only allowed together with `stream: true`.", "stream_options")
    options = request.stream_options or _StreamOptions()
    return Call(
        request.model,
        fields,
        len(body),
        streamed,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        max_output_tokens=limit,
        limit_field=limit_field,
        choices=choices,
        end_user=_end_user(request.user),
        prompt_tokens_bound=prompt_tokens_bound(body, parts),
    )


def _read(body: bytes, decoder: msgspec.json.Decoder[Any]) -> tuple[Fields, Any]:
    try:
        return _cut.decode(body), decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}.") from None


def _complaint(message: str) -> ApiError:
    if missing := _MISSING.search(message):
        return invalid(f"The field `{missing[1]}` is required.", missing[1])
    path = _PATH.search(message)
    if path is None:
        return invalid(f"The request body is not an object of the right shape: {message}.")
    return invalid(f"Wrong type at `{path[1]}`: {message[: path.start()].lower()}.", path[1])


def _end_user(user: str | None) -> str | None:
    if not user:
        return None
    if len(user) > MAX_END_USER_CHARS or "\0" in user:
        raise invalid(f"`user` must have at most {MAX_END_USER_CHARS} characters and no NUL.", "user")
    return user


def prompt_tokens_bound(body: bytes, parts: int) -> int:
    """An upper bound on the prompt's tokens; inline media count by piece, not by their bytes."""
    bound = len(body) + _TEMPLATE_TOKENS * (parts + 1)
    position = body.find(b";base64,")
    while position >= 0:
        end = body.find(b'"', position)
        if end < 0:
            break
        bound -= max(0, end - position - _MEDIA_TOKENS)
        position = body.find(b";base64,", end)
    return bound


def estimated_prompt_tokens(fields: Fields) -> int:
    """A cautious guess for upstreams that report nothing: a token per six bytes of text, at least one."""
    text = 0
    for name in ("messages", "prompt", "input"):
        if name in fields:
            try:
                text += _text_bytes(msgspec.json.decode(fields[name]))
            except (msgspec.MsgspecError, RecursionError):
                continue
    return max(1, text // BYTES_PER_BILLED_TOKEN)


def _text_bytes(value: Any) -> int:
    match value:
        case str():
            return 0 if value.startswith("data:") else len(value.encode(errors="replace"))
        case int():
            return BYTES_PER_BILLED_TOKEN  # a prompt of token ids
        case list():
            return sum(map(_text_bytes, value))
        case dict():
            return sum(_text_bytes(value.get(name)) for name in ("content", "text", "input"))
        case _:
            return 0


def forward_body(call: Call, model: str, output_tokens: int | None, *, continuous_usage: bool) -> bytes:
    """The body for an upstream that knows the model as `model`. output_tokens: a lowered limit per choice, or None."""
    fields = call.fields
    changed: Fields = {}
    if model != call.model:
        changed["model"] = Raw(msgspec.json.encode(model))
    if output_tokens is not None:
        changed[call.limit_field] = Raw(b"%d" % output_tokens)
    if call.streamed:
        changed["stream_options"] = _stream_options(fields.get("stream_options"), continuous_usage)
    return msgspec.json.encode({**fields, **changed} if changed else fields)


_ASK = Raw(b'{"include_usage":true}')
_ASK_EACH = Raw(b'{"include_usage":true,"continuous_usage_stats":true}')


def _stream_options(given: Raw | None, continuous_usage: bool) -> Raw:
    """Usage is always asked for; other options of the client stay."""
    ask = _ASK_EACH if continuous_usage else _ASK
    if given is None or bytes(given) == b"null":
        return ask
    return Raw(msgspec.json.encode({**_cut.decode(given), **_cut.decode(ask)}))
