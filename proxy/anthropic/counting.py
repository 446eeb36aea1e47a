"""`/v1/messages/count_tokens`: costs nothing and asks no upstream, so it tells an estimate and says so."""

from __future__ import annotations

import msgspec

from ledger.errors import LedgerError
from policies.access import check_access
from policies.refusal import Refusal
from proxy.anthropic.dialect import MESSAGES
from proxy.anthropic.request import parse_count
from proxy.asgi import (
    JSON,
    ClientGone,
    Receive,
    Reply,
    Scope,
    Send,
    client_of,
    headers_of,
    read_body,
    refuse_packed_body,
)
from proxy.counting import Counting
from proxy.ids import RequestIds, now_ms
from proxy.openai.errors import (
    ApiError,
    as_api_error,
    method_not_allowed,
    model_not_found,
)
from proxy.openai.requests import BYTES_PER_ESTIMATED_TOKEN, Call
from proxy.worker import Worker

TOKENS_PER_MESSAGE = 4
"""About what a chat template adds around one."""
TOKENS_PER_MEDIUM = 1_600
"""About what an image of a megapixel counts as."""


class CountTokens:
    """The endpoint, as plain ASGI beside the generating ones."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._ids.new(now_ms()), MESSAGES.id_header)
        try:
            if scope["method"] != "POST":
                raise method_not_allowed(scope["method"], scope["path"], "POST")
            call = await self._understand(scope, receive)
        except ClientGone:
            return
        except (ApiError, Refusal, LedgerError) as error:
            known = as_api_error(error)
            await reply.whole(known.status, MESSAGES.error_body(known), [JSON, *known.headers()])
        else:
            told = {"input_tokens": self._estimate(call), "tallygate": {"estimated": True}}
            await reply.whole(200, msgspec.json.encode(told), [JSON])

    def _estimate(self, call: Call) -> int:
        return estimated_tokens(call, self._worker.routes[call.model].deployments[0].upstream.counting)

    async def _understand(self, scope: Scope, receive: Receive) -> Call:
        """The request of someone who may ask this model. Raises ApiError, Refusal, LedgerError, ClientGone."""
        headers = headers_of(scope)
        principal = await self._worker.keys().principal(MESSAGES.token(headers))
        refuse_packed_body(headers)
        call = parse_count(await read_body(receive, self._worker.settings.server.max_body_mb * 2**20))
        address = client_of(scope, self._worker.trusted_proxies)
        check_access(principal, call.model, address, call.end_user, now_ms())
        if call.model not in self._worker.routes:
            raise model_not_found(call.model)
        return call


def estimated_tokens(call: Call, counting: Counting) -> int:
    """Of messages, system and tools: by the upstream's own tokenizer where we have it, else a token per four bytes;
    and something for each message and medium."""
    texts, media = [bytes(call.fields.get("tools", b"")).decode(errors="replace")], 0
    messages = msgspec.json.decode(call.fields["messages"])
    for message in messages:
        content = message.get("content") or ""
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                media += 1
        if "tool_calls" in message:
            texts.append(msgspec.json.encode(message["tool_calls"]).decode())
    text = "".join(texts)
    if counting.needs_text:
        tokens = counting.prompt_tokens(text)
    else:
        tokens = -(-len(text.encode(errors="replace")) // BYTES_PER_ESTIMATED_TOKEN)
    return tokens + TOKENS_PER_MESSAGE * len(messages) + TOKENS_PER_MEDIUM * media
