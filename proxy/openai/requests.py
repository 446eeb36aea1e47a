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
_TEMPLATE_TOKENS = 64
"""Room for what a chat template adds by itself, such as a default system prompt."""
_MEDIA_TOKENS = 4_096
"""What one image, sound or file may count as, whatever its size in bytes: a short address may stand for a large one."""

_MEDIA_MARK = re.compile(rb'"(?:image_url|input_audio|file)"')
"""Without one a prompt has no media, unless an escape spells it. It begins with one certain byte: that scans fast."""
_ESCAPE = re.compile(rb"\\(?=u00)")
"""A look ahead, so that this one begins with one certain byte, too."""
_EMPTY = re.compile(rb"\[\s*\]")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")

_SURCHARGED = {
    "service_tier": frozenset({b"null", b'"auto"', b'"default"', b'"flex"', b'"standard_only"'}),
    "speed": frozenset({b"null", b'"standard"'}),
    "web_search_options": frozenset({b"null"}),
}
"""Fields with a price of their own at some providers, and the values that cost nothing extra."""

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
    def written(self) -> Fields:
        """The request as the client wrote it: what an upstream that needs no translation is sent."""
        written: Fields = self.fields if self.asked is None else self.asked.written
        return written

    @property
    def estimated_tokens(self) -> int:
        """What limits on tokens are charged at admission, corrected later: the prompt and all that may be generated."""
        return self.prompt_tokens_bound // BYTES_PER_ESTIMATED_TOKEN + (self.max_output_tokens or 0) * self.choices

    def least_prompt_tokens(self) -> int:
        """A cautious guess at the prompt, for what a crash leaves unknown: by its text alone. The JSON around it is
        many times as long as a short prompt, and nobody pays for that."""
        return max(1, len(prompt_text(self.fields).encode(errors="replace")) // (2 * BYTES_PER_ESTIMATED_TOKEN))


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Head(msgspec.Struct):
    """The small fields that decide something. The prompt stays as it is."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    user: str | None = None


_GENERATING = ("model", "stream", "stream_options", "max_tokens", "n", "user")
_head = msgspec.json.Decoder(_Head)
_list = msgspec.json.Decoder(list[Raw])


def parse_chat(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    fields = _fields(body)
    messages = _prompt(fields, "messages", b"[")
    request = _read_head(
        fields, "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "user"
    )
    if _EMPTY.fullmatch(messages):
        raise invalid("`messages` is empty: send at least one message.", "messages")
    newer = request.max_completion_tokens is not None
    if newer and request.max_tokens is not None:  # which of them an upstream obeys cannot be known, so nor what to hold
        message = "`max_tokens` and `max_completion_tokens` cannot both be given: send `max_completion_tokens` alone."
        raise invalid(message, "max_tokens", "invalid_parameter_combination")
    limit_field = "max_completion_tokens" if newer else "max_tokens"
    limit = request.max_completion_tokens if newer else request.max_tokens
    return _call(fields, body, request, limit, limit_field, request.n or 1)


def parse_completion(body: bytes) -> Call:
    """Raises ApiError 400 that names the field. Several prompts are several choices."""
    fields = _fields(body)
    prompts = _prompts(_prompt(fields, "prompt", b'["', b'""'))
    request = _read_head(fields, *_GENERATING, "best_of")
    choices = prompts * max(request.n or 1, request.best_of or 1)
    return _call(fields, body, request, request.max_tokens, "max_tokens", choices)


def parse_embedding(body: bytes) -> Call:
    """Raises ApiError 400 that names the field."""
    fields = _fields(body)
    _prompt(fields, "input", b'["')
    request = _read_head(fields, "model", "user")
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
        prompt_tokens_bound=prompt_tokens_bound(fields, len(body)),
    )


def refuse_surcharges(call: Call) -> None:
    """Raises ApiError 400 for what a provider charges extra for beside tokens: no price here covers it."""
    for name, harmless in _SURCHARGED.items():
        value = call.written.get(name)
        if value is not None and bytes(value) not in harmless:
            message = f"`{name}` is not supported like this: it costs a surcharge that no price covers."
            raise invalid(message, name, "unsupported_parameter")


def _call(fields: Fields, body: bytes, request: _Head, limit: int | None, limit_field: str, choices: int) -> Call:
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
        prompt_tokens_bound=prompt_tokens_bound(fields, len(body)),
    )


def empty_body() -> ApiError:
    return invalid("The request body is empty: send a JSON object.")


def _fields(body: bytes) -> Fields:
    """The top level, cut: one pass over the body, however large. Raises ApiError 400."""
    if not body:
        raise empty_body()
    try:
        return _cut.decode(body)
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}.") from None


def _prompt(fields: Fields, name: str, begins: bytes, default: bytes | None = None) -> memoryview:
    """The field that holds the prompt, as it was written. begins: the first bytes that its type may have."""
    found = fields.get(name, default)
    if found is None:
        raise invalid(f"The field `{name}` is required.", name)
    raw = memoryview(found)
    if bytes(raw[:1]) not in begins:
        kinds = " or ".join({"[": "an array", '"': "a string"}[kind] for kind in begins.decode())
        raise invalid(f"Wrong type at `{name}`: expected {kinds}.", name)
    return raw


def _read_head(fields: Fields, *names: str) -> _Head:
    """Raises ApiError 400."""
    try:
        return _head.decode(msgspec.json.encode({name: fields[name] for name in names if name in fields}))
    except msgspec.ValidationError as error:
        raise _complaint(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}.") from None


def _prompts(prompt: memoryview) -> int:
    """How many prompts a completion has; token ids are one."""
    if bytes(prompt[:1]) == b'"':
        return 1
    try:
        parts = _list.decode(prompt)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"Wrong type at `prompt`: {error}.", "prompt") from None
    return len(parts) if parts and bytes(parts[0])[:1] in b'["' else 1


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


def prompt_tokens_bound(fields: Fields, body_bytes: int) -> int:
    """An upper bound on the prompt's tokens: one a byte, which the JSON around a message makes more than its template.
    Media count by piece, not by their bytes."""
    bound = body_bytes + _TEMPLATE_TOKENS
    messages = fields.get("messages")
    if messages is None or not _may_hold_media(memoryview(messages)):
        return bound
    try:
        return max(1, bound - _surplus(msgspec.json.decode(messages)))
    except (msgspec.MsgspecError, RecursionError):
        return bound


def _may_hold_media(messages: memoryview) -> bool:
    return _MEDIA_MARK.search(messages) is not None or _ESCAPE.search(messages) is not None


def _surplus(value: Any) -> int:
    """The bytes of media beyond what each may count as; less than nothing where they are fewer. Only parts that an
    upstream takes for media count so: text that merely looks like them is text."""
    match value:
        case list():
            return sum(map(_surplus, value))
        case {"content": list() as content}:
            return _surplus(content)
        case {"type": "image_url", "image_url": {"url": str() as data}}:
            return _beyond(data)
        case {"type": "input_audio", "input_audio": {"data": str() as data}}:
            return _beyond(data)
        case {"type": "file", "file": {"file_data": str() as data}}:
            return _beyond(data)
        case {"image_url": _} | {"input_audio": _} | {"file": _}:  # an address or an id, however it is written
            return _beyond("")
        case _:
            return 0


def _beyond(data: str) -> int:
    return len(data) - _MEDIA_TOKENS


def prompt_text(fields: Fields) -> str:
    """All text of a prompt, joined, for upstreams that do not count it. Inline media and what cannot be read: none."""
    texts: list[str] = []
    for name in ("messages", "prompt", "input"):
        if name in fields:
            try:
                _gather(msgspec.json.decode(fields[name]), texts)
            except (msgspec.MsgspecError, RecursionError):
                continue
    return "".join(texts)


def _gather(value: Any, texts: list[str]) -> None:
    match value:
        case str():
            if not value.startswith("data:"):
                texts.append(value)
        case bool():
            pass
        case int():
            texts.append("token ")  # a prompt of token ids
        case list():
            for item in value:
                _gather(item, texts)
        case dict():
            for name in ("content", "text", "input"):
                _gather(value.get(name), texts)


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
