"""Chat answers → response objects, in one piece or as events. Pure.

Source: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Raw

from proxy.openai.blocks import AnswerInBlocks, Block, BlockReader
from proxy.openai.errors import ApiError
from proxy.openai.requests import Call
from proxy.openai.responses.request import Asked
from proxy.openai.translation import Object

_PREFIXES = {"reasoning": "rs", "text": "msg", "refusal": "msg", "call": "fc"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Responder:
    """One response: its identity, what it repeats of its request, and how its parts look."""

    def __init__(self, request_id: str, call: Call) -> None:
        self._digits = request_id.replace("-", "")
        self._asked: Asked = call.asked
        self._model = call.model
        self._created_at = int(time.time())

    @property
    def shows_logprobs(self) -> bool:
        return self._asked.logprobs

    def response(self, status: str, model: str | None, service_tier: str | None, **more: Any) -> Object:
        return {
            "id": f"resp_{self._digits}",
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "model": model or self._model,
            "output": [],
            "usage": None,
            "service_tier": service_tier or "default",
            **self._asked.echo,
            **more,
        }

    def finished(
        self,
        blocks: list[Block],
        finish_reason: str | None,
        model: str | None,
        service_tier: str | None,
        usage: bytes,
    ) -> Object:
        """The whole response. usage: the settled usage object of chat completions."""
        reason = _INCOMPLETE.get(finish_reason or "")
        output = [self.item(block, "completed") for block in blocks]
        if reason is not None and output and "status" in output[-1]:
            output[-1]["status"] = "incomplete"
        return self.response(
            "completed" if reason is None else "incomplete",
            model,
            service_tier,
            incomplete_details=None if reason is None else {"reason": reason},
            output=output,
            usage=usage_of(usage),
        )

    def item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._digits}{block.index:02x}"

    def item(self, block: Block, status: str) -> Object:
        item_id = self.item_id(block)
        begun = status == "in_progress"
        match block.kind:
            case "call":
                return {
                    "id": item_id,
                    "type": "function_call",
                    "status": status,
                    "call_id": block.call_id or item_id,
                    "name": block.name,
                    "arguments": block.text,
                }
            case "reasoning":
                content = [] if begun else [self.part(block)]
                return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
            case _:
                content = [] if begun else [self.part(block)]
                return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, block: Block) -> Object:
        match block.kind:
            case "reasoning":
                return {"type": "reasoning_text", "text": block.text}
            case "refusal":
                return {"type": "refusal", "refusal": block.text}
            case _:
                logprobs = block.logprobs if self.shows_logprobs else []
                return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}


class PlainResponse(AnswerInBlocks):
    """Raises NoAnswer."""

    def __init__(self, request_id: str, call: Call, body: bytes) -> None:
        super().__init__(body)
        self._responder = Responder(request_id, call)

    def body(self, usage: bytes) -> bytes:
        frame = self.frame
        return msgspec.json.encode(
            self._responder.finished(self.blocks, self.finish_reason, frame.model, frame.service_tier, usage)
        )


class ResponseReader(BlockReader):
    """A chat stream told as the events of a response, numbered from 0."""

    def __init__(self, request_id: str, call: Call) -> None:
        super().__init__(call)
        self._responder = Responder(request_id, call)
        self._number = 0

    def begin(self) -> bytes:
        response = self._responder.response("in_progress", self.frame.model, self.frame.service_tier)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def opened(self, block: Block) -> bytes:
        item = self._responder.item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._of_part("response.content_part.added", block, part=self._responder.part(block))

    def grown(self, block: Block, text: str, logprobs: list[Raw]) -> bytes:
        match block.kind:
            case "call":
                return self._of_item("response.function_call_arguments.delta", block, delta=text)
            case "text":
                shown = logprobs if self._responder.shows_logprobs else []
                return self._of_part("response.output_text.delta", block, delta=text, logprobs=shown)
            case "refusal":
                return self._of_part("response.refusal.delta", block, delta=text)
            case _:
                return self._of_part("response.reasoning_text.delta", block, delta=text)

    def closed(self, block: Block, status: str) -> bytes:
        part = self._responder.part(block)
        match block.kind:
            case "call":
                done = self._of_item(
                    "response.function_call_arguments.done", block, name=block.name, arguments=block.text
                )
            case "text":
                done = self._of_part("response.output_text.done", block, text=block.text, logprobs=part["logprobs"])
            case "refusal":
                done = self._of_part("response.refusal.done", block, refusal=block.text)
            case _:
                done = self._of_part("response.reasoning_text.done", block, text=block.text)
        if block.kind != "call":
            done += self._of_part("response.content_part.done", block, part=part)
        item = self._responder.item(block, status)
        return done + self._event("response.output_item.done", output_index=block.index, item=item)

    def tail(self, usage: bytes, *, cut: bool) -> bytes:
        """The last blocks' ends and the whole response; there is no `[DONE]` in this dialect."""
        if cut:
            self.finish_reason = "length"
        response = self._responder.finished(
            self.blocks, self.finish_reason, self.frame.model, self.frame.service_tier, usage
        )
        start = self.start()
        end = self.close_open("incomplete" if response["status"] == "incomplete" else "completed")
        return start + end + self._event(f"response.{response['status']}", response=response)

    def error_event(self, error: ApiError) -> bytes:
        """As OpenAI's servers do: an `error` event, which SDKs raise, then the response as failed."""
        failed = self._responder.response(
            "failed",
            self.frame.model,
            self.frame.service_tier,
            error={"code": error.code or error.type, "message": error.message},
            output=[self._responder.item(block, "incomplete") for block in self.blocks],
        )
        told = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", error=error.object(), **told) + self._event("response.failed", response=failed)

    def _of_item(self, name: str, block: Block, /, **fields: Any) -> bytes:
        return self._event(name, item_id=self._responder.item_id(block), output_index=block.index, **fields)

    def _of_part(self, name: str, block: Block, /, **fields: Any) -> bytes:
        return self._of_item(name, block, content_index=0, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        payload = msgspec.json.encode({"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def usage_of(usage: bytes) -> Object:
    """The usage of a response from the settled usage object of chat completions."""
    used = msgspec.json.decode(usage)
    details = used["prompt_tokens_details"]
    reasoning = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": details.get("cache_write_tokens", 0),
        },
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": used["total_tokens"],
        "tallygate": used["tallygate"],
    }
