"""What is promised on the wire, row by row, with the bytes: a request, what the upstream answers, what comes back.

In expected bytes `<*>` stands for anything (an id, a time, the wording of a message); all else is literal. Expected
headers are those that a promise is about; None: the header must not be there. `sent` is what the upstream must have
received somewhere in its request; `unasked`: it must not have been asked at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.proxy.scripted import Script

CHAT = "/v1/chat/completions"
HI = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
STREAM = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
STREAM_WITH_USAGE = STREAM[:-1] + b',"stream_options":{"include_usage":true}}'

JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
USED = b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}'
ANSWER = b'{"id":"c1","choices":[{"index":0,"message":{"content":"yes"},"finish_reason":"stop"}],' + USED + b"}"
YES = b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"yes"},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"id":"c1","choices":[],' + USED + b"}\n\n"
DONE = b"data: [DONE]\n\n"
BILLED = (
    b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":0},'
    b'"tallygate":{"billed_tokens":4,"cost_usd":"0.00000126","cost_cny":"0.000009198","price_version":"pv_1",'
    b'"speculative":null}}'
)


def upstream(*packets: bytes, stays: bool = False, resets: bool = False) -> Script:
    return Script(packets, stays=stays, resets=resets)


PLAIN = upstream(JSON, ANSWER)
STREAMED = upstream(SSE, YES, USAGE, DONE)


def failing(status: int, body: bytes, *headers: bytes) -> Script:
    return upstream(b"\r\n".join([b"HTTP/1.1 %d X" % status, *headers, b"", body]))


def error(kind: str, code: str | None, param: str | None = None) -> bytes:
    """OpenAI's error object."""
    quoted = [f'"{value}"' if value else "null" for value in (param, code)]
    return f'{{"error":{{"message":"<*>","type":"{kind}","param":{quoted[0]},"code":{quoted[1]}}}}}'.encode()


@dataclass(frozen=True)
class Row:
    promise: str
    body: bytes
    status: int
    answer: bytes
    headers: dict[str, str | None] = field(default_factory=dict)
    path: str = CHAT
    upstream: Script = PLAIN
    key: str | None = "good"
    asks_with: bytes = b""
    """Header lines of the request."""
    sent: bytes = b""
    unasked: bool = False
    before: int = 0
    """How often the same request is made first."""
    before_body: bytes | None = None
    beside: bool = False
    """The same request is still running."""


INVALID, PERMISSION, API = "invalid_request_error", "permission_error", "api_error"
NO_RETRY, RETRY = {"x-should-retry": "false"}, {"x-should-retry": "true"}
NO_WORD: dict[str, str | None] = {"x-should-retry": None}


def broken(promise: str, script: Script, body: bytes = HI) -> Row:
    return Row(promise, body, 502, error(API, "upstream_error"), NO_RETRY, upstream=script)


def passed(status: int, *headers: bytes, **expected: str) -> Row:
    object_ = b'{"error":{"message":"theirs","type":"t","param":"p","code":"c","more":[1]}}'
    promise = f"an upstream's {status} passes through with its error object"
    return Row(promise, HI, status, object_, dict(expected), upstream=failing(status, object_, *headers))


def asked(name: bytes, value: bytes) -> bytes:
    """The chat request with one more field."""
    return HI[:-1] + b',"%b":%b}' % (name, value)


ERRORS = [
    Row("no key", HI, 401, error(INVALID, "invalid_api_key"), NO_WORD, key=None, unasked=True),
    Row("a wrong key", HI, 401, error(INVALID, "invalid_api_key"), NO_WORD, key="wrong", unasked=True),
    Row("a blocked key", HI, 403, error(PERMISSION, "key_blocked"), NO_RETRY, key="blocked", unasked=True),
    Row("an expired key", HI, 403, error(PERMISSION, "key_expired"), NO_RETRY, key="expired", unasked=True),
    Row("a key for other addresses", HI, 403, error(PERMISSION, "ip_not_allowed"), NO_RETRY, key="elsewhere"),
    Row("a key for other models", HI, 403, error(PERMISSION, "model_not_allowed"), NO_RETRY, key="other models"),
    Row("an unknown model", HI.replace(b'"m"', b'"?"'), 404, error(INVALID, "model_not_found"), NO_WORD, unasked=True),
    Row(
        "a draft that is not allowed",
        HI,
        400,
        error(INVALID, "speculative_model_not_supported", "X-Draft-Model"),
        NO_WORD,
        asks_with=b"x-draft-model: other\r\n",
        unasked=True,
    ),
    Row("bad JSON", b'{"model":', 400, error(INVALID, None), NO_WORD, unasked=True),
    Row("a missing field", b'{"model":"m"}', 400, error(INVALID, None, "messages"), NO_WORD, unasked=True),
    Row("a wrong type", asked(b"max_tokens", b'"8"'), 400, error(INVALID, None, "max_tokens"), NO_WORD),
    Row("a body too large", b" " * 2**20 + HI, 413, error(INVALID, "request_too_large"), NO_WORD, unasked=True),
    Row("requests per hour", HI, 429, error("rate_limit_error", "rate_limit_exceeded"), RETRY, key="limited", before=1),
    Row("no money", HI, 429, error("insufficient_quota", "insufficient_quota"), NO_RETRY, key="poor", unasked=True),
    Row("no first byte in time", HI, 504, error(API, "upstream_timeout"), NO_RETRY, upstream=upstream(stays=True)),
    Row("the same, streamed", STREAM, 504, error(API, "upstream_timeout"), NO_RETRY, upstream=upstream(stays=True)),
    passed(400),
    passed(404),
    passed(413),
    passed(422),
    passed(429),
    passed(429, b"retry-after: 7", **{"retry-after": "7"}),
    *(
        broken(f"an upstream's {status} is ours to answer for", failing(status, b'{"error":{"message":"theirs"}}'))
        for status in (401, 403, 500, 502, 503, 529)
    ),
    broken("an HTML page", upstream(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<html></html>")),
    broken("a 200 with an error body", upstream(JSON, b'{"error":{"message":"theirs"}}')),
    broken("a reset", upstream(JSON, b'{"id":', resets=True)),
    broken("a short body", upstream(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n", ANSWER)),
    broken("a stream that begins with an error", upstream(SSE, b'data: {"error":{"message":"theirs"}}\n\n'), STREAM),
    Row(
        "every deployment rests",
        HI.replace(b'"m"', b'"resting"'),
        503,
        error(API, "no_deployment_available"),
        {**RETRY, "retry-after": "<*>", "retry-after-ms": "<*>"},
        upstream=failing(500, b""),
        before=3,
    ),
    Row(
        "an upstream that fails once the answer has begun",
        STREAM,
        200,
        b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"ye"}}]}\n\ndata: '
        + error(API, "upstream_error")
        + b"\n\n",
        upstream=upstream(SSE, b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"ye"}}]}\n\n', resets=True),
    ),
    Row(
        "the same Idempotency-Key with another body",
        HI,
        422,
        error(INVALID, "idempotency_mismatch"),
        NO_RETRY,
        asks_with=b"idempotency-key: other\r\n",
        before=1,
        before_body=asked(b"seed", b"1"),
    ),
    Row(
        "the same Idempotency-Key while it runs",
        HI,
        409,
        error(INVALID, "idempotency_in_progress"),
        NO_RETRY,
        asks_with=b"idempotency-key: running\r\n",
        upstream=upstream(stays=True),
        beside=True,
    ),
    Row("no price", HI.replace(b'"m"', b'"free"'), 403, error(PERMISSION, "price_not_found"), NO_RETRY, unasked=True),
    Row("nothing is there", HI, 404, error(INVALID, "not_found"), {"x-request-id": "<*>"}, path="/v1/nothing"),
]

HEADERS = [
    Row(
        "each answer carries an id, its time and what it cost",
        HI,
        200,
        b"<*>",
        {
            "x-request-id": "<*>",
            "openai-processing-ms": "<*>",
            "x-tallygate-cost-usd": "0.00000126",
            "x-tallygate-cost-cny": "0.000009198",
            "x-tallygate-deployment": "chat",
            "x-tallygate-draft-model": "none",
        },
    ),
    Row(
        "the limits are the key's own",
        HI,
        200,
        b"<*>",
        {"x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "4", "x-ratelimit-reset-requests": "<*>"},
        key="counted",
        upstream=failing(200, ANSWER, b"x-ratelimit-limit-requests: 9", b"content-type: application/json"),
    ),
    Row(
        "headers of the provider's account stay with us",
        HI,
        200,
        b"<*>",
        {"openai-organization": None, "set-cookie": None, "anthropic-ratelimit-requests-limit": None},
        upstream=failing(
            200, ANSWER, b"openai-organization: o", b"set-cookie: a=b", b"anthropic-ratelimit-requests-limit: 1"
        ),
    ),
    Row("the upstream gets its own key", HI, 200, b"<*>", sent=b"authorization: Bearer sk-upstream\r\n"),
]

PASSED = [
    Row(
        "all that is not usage passes as it came",
        HI,
        200,
        b'{"id":"c1","choices":[{"index":0,"message":{"content":"yes"},"finish_reason":"stop"}],' + BILLED + b"}",
    ),
    Row(
        "unknown fields reach the upstream as they were written",
        asked(b"x_own", b'{ "deep" : [1.0, 2e3, "\\u00e9"] }'),
        200,
        b"<*>",
        sent=b'"x_own":{ "deep" : [1.0, 2e3, "\\u00e9"] }',
    ),
    Row(
        "so do tools, schemas and images",
        asked(b"tools", b'[ {"type":"function"} ]'),
        200,
        b"<*>",
        sent=b'"tools":[ {"type":"function"} ]',
    ),
    Row("the upstream's own name for the model is put in", HI, 200, b"<*>", sent=b'"model":"gpt-4"'),
]

STREAMS = [
    Row(
        "usage is always asked for",
        STREAM,
        200,
        b"<*>",
        upstream=STREAMED,
        sent=b'"stream_options":{"include_usage":true}',
    ),
    Row("and shown to those alone who asked", STREAM, 200, YES + DONE, upstream=STREAMED),
    Row(
        "who asked gets one more chunk of it before [DONE]",
        STREAM_WITH_USAGE,
        200,
        YES + b'data: {"id":"c1","choices":[],' + BILLED + b"}\n\n" + DONE,
        {"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"},
        upstream=STREAMED,
    ),
    Row("an end without [DONE] gets one", STREAM, 200, YES + DONE, upstream=upstream(SSE, YES, USAGE)),
    Row(
        "CR LF, comments, names and missing spaces pass as they came",
        STREAM,
        200,
        b": hello\r\n\r\nevent: message\r\nid: 1\r\n"
        b'data:{"choices":[{"delta":{"content":"\xe8\xb4\xa6"},"finish_reason":"stop"}]}\r\n\r\n' + DONE,
        upstream=upstream(
            SSE,
            b": hello\r\n\r\nevent: mess",
            b'age\r\nid: 1\r\ndata:{"choices":[{"delta":{"content":"\xe8\xb4',
            b'\xa6"},"finish_reason":"stop"}]}\r\n\r\n' + USAGE + DONE,
        ),
    ),
    Row(
        "a plain answer to a request for a stream is streamed",
        STREAM,
        200,
        b"data: <*>yes<*>\n\n" + DONE,
        upstream=PLAIN,
    ),
]


def counted(promise: str, told: bytes, prompt: int, generated: int, cached: int = 0) -> Row:
    """An answer of three letters, with this usage."""
    shown = b'<*>"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    shown += b'"prompt_tokens_details":{"cached_tokens":%d}<*>'
    script = upstream(JSON, ANSWER.replace(USED, told))
    return Row(promise, HI, 200, shown % (prompt, generated, prompt + generated, cached), upstream=script)


COUNTS = [
    counted("plain fields", USED, 3, 1),
    counted(
        "cached tokens of OpenAI, vLLM, SGLang",
        b'"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":8}}',
        9,
        1,
        8,
    ),
    counted(
        "cache hits of DeepSeek",
        b'"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_cache_hit_tokens":6,"prompt_cache_miss_tokens":3}',
        9,
        1,
        6,
    ),
    counted("an explicit zero is said", b'"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}', 0, 0),
    counted("null is counted here", b'"usage":null', 1, 1),
    counted("a negative count is not believed", b'"usage":{"prompt_tokens":-3,"completion_tokens":1}', 1, 1),
    counted("nor one above 100 000 000", b'"usage":{"prompt_tokens":3,"completion_tokens":100000001}', 1, 1),
    counted("nor a fraction", b'"usage":{"prompt_tokens":3,"completion_tokens":1.5}', 1, 1),
]

MESSAGES = [
    Row(
        "Anthropic's errors have its shape, with our code in the message",
        HI,
        401,
        b'{"type":"error","error":{"type":"authentication_error","message":"invalid_api_key: <*>"}<*>}',
        {"request-id": "<*>", "x-request-id": "<*>"},
        path="/v1/messages",
        key=None,
    ),
    Row(
        "Anthropic's usage: input without cached tokens",
        HI[:-1] + b',"max_tokens":8}',
        200,
        b'{"id":"<*>"type":"message"<*>"stop_reason":"end_turn"<*>"input_tokens":3<*>"output_tokens":1<*>}',
        path="/v1/messages",
    ),
    Row(
        "responses end their usage in output_tokens",
        b'{"model":"m","input":"hi"}',
        200,
        b'{"id":"resp_<*>"object":"response"<*>"status":"completed"<*>"input_tokens":3<*>"output_tokens":1<*>}',
        path="/v1/responses",
    ),
    Row("the same paths work without /v1", HI, 200, b"<*>yes<*>", path="/chat/completions"),
]

TABLE = {
    "errors": ERRORS,
    "headers": HEADERS,
    "pass-through": PASSED,
    "streams": STREAMS,
    "usage": COUNTS,
    "dialects": MESSAGES,
}
