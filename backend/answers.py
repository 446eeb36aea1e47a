"""Answers in the OpenAI dialect: whole bodies and stream chunks, from what the rounds add."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from backend.sampling import TokenLogprobs
from backend.sequence import Sequence as Running
from backend.sequence import SpeculationStats, Update
from backend.text import Tokenizer
from backend.tools import parse_calls, safe_length


class AnswerWriter:
    """Collects the choices of one request and writes them as bodies or chunks. chat: which of the two dialects."""

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        draft: str | None,
        tokenizer: Tokenizer,
        fingerprint: str,
        tools: bool = False,
        echo: str = "",
    ) -> None:
        prefix = "chatcmpl-" if chat else "cmpl-"
        self.draft = draft
        self._chat = chat
        self._tools = tools
        self._echo = echo
        self._shown: dict[int, int] = {}  # with tools: characters of each choice that were sent as content
        self._tokenizer = tokenizer
        self._sequences: Sequence[Running] = ()
        self._updates: dict[int, Update] = {}
        self._texts: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._head: dict[str, Any] = {
            "id": prefix + uuid.uuid4().hex,
            "object": ("chat.completion" if chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def start(self, sequences: Sequence[Running]) -> None:
        self._sequences = sequences

    def add(self, choice: int, update: Update) -> None:
        self._updates[choice] = update
        self._texts.setdefault(choice, []).append(update.text)
        self._logprobs.setdefault(choice, []).extend(update.logprobs)

    def usage(self) -> dict[str, Any]:
        """Cumulative usage of what was written so far. Draft and verification work stands apart, and is not counted."""
        prompt = self._sequences[0].prompt_tokens if self._sequences else 0
        cached = self._sequences[0].cached_tokens if self._sequences else 0
        generated = sum(update.generated_tokens for update in self._updates.values())
        stats = [update.stats for update in self._updates.values()]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "tallygate": {"speculative": speculative_block(self.draft, stats)},
        }

    def body(self) -> dict[str, Any]:
        """The whole answer, once every choice is over."""
        choices = []
        for choice in range(len(self._sequences)):
            text = "".join(self._texts.get(choice, ()))
            logprobs = self._logprobs_block(self._sequences[choice], self._logprobs.get(choice, []), 0)
            finish = self._updates[choice].finish_reason
            entry: dict[str, Any] = {"index": choice, "finish_reason": finish, "logprobs": logprobs}
            if self._chat:
                entry["message"] = self._message(text)
                if entry["message"].get("tool_calls") and finish == "stop":
                    entry["finish_reason"] = "tool_calls"
            else:
                entry["text"] = self._echo + text
            choices.append(entry)
        return {**self._head, "choices": choices, "usage": self.usage()}

    def _message(self, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._tools:
            outside, calls = parse_calls(text)
            if calls:
                message |= {"content": outside or None, "tool_calls": calls}
        return message

    def chunks(self, choice: int, update: Update, *, with_usage: bool) -> Iterator[bytes]:
        """Stream events for one update; the first of a choice names the role, the last one why it ended."""
        first = choice not in self._updates
        offset = sum(map(len, self._texts.get(choice, ())))
        self.add(choice, update)
        sequence = self._sequences[choice]
        if self._chat and first:
            yield self._chunk(choice, {"role": "assistant", "content": ""}, None, None, with_usage)
        if self._echo and first:
            yield self._chunk(choice, {"content": self._echo}, None, None, with_usage)
        finish: str | None = update.finish_reason
        text = self._showable(choice, over=finish is not None) if self._tools else update.text
        if text or update.logprobs:
            logprobs = self._logprobs_block(sequence, list(update.logprobs), offset)
            yield self._chunk(choice, {"content": text}, logprobs, None, with_usage)
        if finish is not None:
            calls = parse_calls("".join(self._texts[choice]))[1] if self._tools else []
            if calls:
                numbered = [{"index": at, **call} for at, call in enumerate(calls)]
                yield self._chunk(choice, {"tool_calls": numbered}, None, None, with_usage)
                finish = "tool_calls" if finish == "stop" else finish
            yield self._chunk(choice, {}, None, finish, with_usage)

    def _showable(self, choice: int, *, over: bool) -> str:
        """New content that is surely not part of a tool call."""
        text = "".join(self._texts[choice])
        shown = self._shown.get(choice, 0)
        if over:
            end = safe_length(text) if parse_calls(text)[1] else len(text)
        else:
            end = safe_length(text)
        self._shown[choice] = max(shown, end)
        return text[shown:end]

    def usage_chunk(self) -> bytes:
        return event({**self._chunk_head(), "choices": [], "usage": self.usage()})

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head

    def _chunk(self, choice: int, delta: dict[str, Any], logprobs: Any, finish: str | None, with_usage: bool) -> bytes:
        entry: dict[str, Any] = {"index": choice, "logprobs": logprobs, "finish_reason": finish}
        if self._chat:
            entry["delta"] = delta
        else:
            entry["text"] = delta.get("content", "")
        chunk = {**self._chunk_head(), "choices": [entry]}
        if with_usage:
            chunk["usage"] = self.usage()
        return event(chunk)

    def _logprobs_block(self, sequence: Running, entries: list[TokenLogprobs], offset: int) -> dict[str, Any] | None:
        if sequence.request.logprobs is None:
            return None
        if self._chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        texts = [self._text(entry.token) for entry in entries]
        offsets, at = [], offset
        for text in texts:
            offsets.append(at)
            at += len(text)
        tops = [{self._text(token): value for token, value in entry.top} for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops if sequence.request.logprobs else None,
            "text_offset": offsets,
        }

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._text(token),
            "logprob": max(logprob, -9999.0),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def speculative_block(draft: str | None, stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """acceptance_rate is accepted / drafted, None where nothing was drafted."""
    drafted = sum(s.draft_tokens for s in stats)
    accepted = sum(s.accepted_tokens for s in stats)
    return {
        "draft_model": draft,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "target_passes": sum(s.target_passes for s in stats),
    }


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
