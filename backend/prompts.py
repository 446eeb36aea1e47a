"""From a request body and its headers to what the engine has to do."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from backend import tools, wire
from backend.errors import BadRequest
from backend.grammar import GrammarCompiler, grammar_of_format
from backend.sequence import Request
from backend.text import Tokenizer


class UnknownModel(Exception):
    """A model name that is not served here."""

    def __init__(self, name: str, served: tuple[str, ...]) -> None:
        super().__init__(name)
        self.name = name
        self.served = served


class Model(Protocol):
    """What planning needs to know of the loaded model."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def stop_tokens(self) -> frozenset[int]: ...
    @property
    def drafts(self) -> Mapping[str, str]: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def grammars(self) -> GrammarCompiler: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request, understood: the engine's requests, one per choice, and how to answer."""

    model: str
    requests: list[Request]
    draft: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    tools: bool = False
    echo: str = ""  # the prompt's text, where it is to stand before the answer


def plan_chat(body: bytes, headers: Mapping[str, str], model: Model, served: tuple[str, ...]) -> Plan:
    """Raises BadRequest or UnknownModel."""
    asked = wire.decode_chat(body)
    _check_model(asked.model, served)
    if not model.tokenizer.has_chat_template:
        raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
    wanted = tools.tools_of(asked.tools, asked.tool_choice)
    prompt = _chat_prompt(asked, wanted, model.tokenizer)
    top = (asked.top_logprobs or 0) if asked.logprobs else None
    rules, field = grammar_of_format(asked.response_format), "response_format"
    if wanted is not None and wanted.forced:
        rules, field = wanted.grammar, "tools"
    plan = _plan(asked, [prompt], headers, model, top, default_tokens=None)
    if rules is not None:
        requests = [replace(request, grammar=model.grammars.start(rules, field)) for request in plan.requests]
        plan = replace(plan, requests=requests)
    return replace(plan, tools=wanted is not None)


def _chat_prompt(asked: wire.ChatBody, wanted: tools.Tools | None, tokenizer: Tokenizer) -> list[int]:
    """Tools go through the chat template where it knows of them, and into words where it does not."""
    messages = wire.plain_messages(asked.messages)
    if tokenizer.template_mentions("tools"):
        return tokenizer.chat(tools.with_argument_objects(messages), wanted.tools if wanted else None)
    return tokenizer.chat(tools.told_in_words(messages, wanted))


def plan_completion(body: bytes, headers: Mapping[str, str], model: Model, served: tuple[str, ...]) -> Plan:
    """Raises BadRequest or UnknownModel."""
    asked = wire.decode_completion(body)
    _check_model(asked.model, served)
    prompts = _prompts_of(asked, model)
    plan = _plan(asked, prompts, headers, model, asked.logprobs, default_tokens=16)
    if not asked.echo:
        return plan
    return replace(plan, echo=asked.prompt if isinstance(asked.prompt, str) else model.tokenizer.decode(prompts[0]))


def _check_model(name: str, served: tuple[str, ...]) -> None:
    if name not in served:
        raise UnknownModel(name, served)


def _prompts_of(asked: wire.CompletionBody, model: Model) -> list[list[int]]:
    given = asked.prompt
    if isinstance(given, str):
        return [model.tokenizer.encode(given, special=True)]
    if not given:
        raise BadRequest("`prompt` is empty", param="prompt")
    prompts: list[list[int]] = []
    tokens = [item for item in given if isinstance(item, int)]
    if tokens:
        if len(tokens) < len(given):
            raise BadRequest("`prompt` mixes tokens with texts", param="prompt")
        prompts.append(tokens)
    for item in given:
        if isinstance(item, str):
            prompts.append(model.tokenizer.encode(item, special=True))
        elif isinstance(item, list):
            prompts.append(item)
    if any(not 0 <= token < model.vocabulary for prompt in prompts for token in prompt):
        raise BadRequest(f"`prompt` holds a token outside 0 to {model.vocabulary - 1}", param="prompt")
    if len(prompts) > 1:
        raise BadRequest("one prompt per request, please; send several requests", param="prompt")
    return prompts


def _plan(
    asked: wire.ChatBody | wire.CompletionBody,
    prompts: list[list[int]],
    headers: Mapping[str, str],
    model: Model,
    logprobs: int | None,
    default_tokens: int | None,
) -> Plan:
    mode, draft = speculation_of(headers, model.drafts)
    room = model.context_tokens - len(prompts[0])
    if room < 1:
        raise BadRequest(
            f"the prompt has {len(prompts[0])} tokens; this model's context holds {model.context_tokens}, "
            "answer included: shorten the prompt",
            param="messages" if isinstance(asked, wire.ChatBody) else "prompt",
            code="context_length_exceeded",
        )
    name, seed = uuid.uuid4().hex, wire.fresh_seed()
    requests = [
        Request(
            id=f"{name}-{choice}",
            prompt=prompts[0],
            max_tokens=min(room, wire.max_tokens_of(asked, default_tokens or room)),
            sampling=wire.sampling_of(asked, model.vocabulary, choice, seed),
            stop=wire.stops_of(asked),
            stop_tokens=frozenset() if asked.ignore_eos else model.stop_tokens,
            logprobs=logprobs,
            draft=draft,
            forced=mode == "enabled",
            tenant=headers.get("x-tallygate-team") or asked.user or "",
        )
        for choice in range(wire.choices_of(asked))
    ]
    options = asked.stream_options or wire.StreamOptions()
    return Plan(
        model=asked.model,
        requests=requests,
        draft=draft,
        stream=bool(asked.stream),
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
    )


def speculation_of(headers: Mapping[str, str], drafts: Mapping[str, str]) -> tuple[str, str | None]:
    """(mode, draft) from the two headers. A named draft is checked also where speculation is off."""
    mode = (headers.get("x-speculative-decoding") or "auto").strip().lower()
    if mode not in ("enabled", "disabled", "auto"):
        raise BadRequest(
            f"X-Speculative-Decoding must be enabled, disabled or auto, not {mode!r}", param="X-Speculative-Decoding"
        )
    draft = (headers.get("x-draft-model") or "").strip() or None
    if draft is not None and draft not in drafts:
        raise BadRequest(
            f"the draft model {draft!r} is not available here; available: {', '.join(drafts) or 'none'}",
            param="X-Draft-Model",
            code="speculative_model_not_supported",
        )
    if mode == "disabled":
        return mode, None
    return mode, draft or next(iter(drafts), None)
