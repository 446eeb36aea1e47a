"""Every scenario with the real `openai` package for Python: sync, async, streaming helpers, `parse`, responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from pydantic import BaseModel
from scenarios import API_KEY, BASE_URL, BROKEN_MODEL, MESSAGES, PICTURE, TOOLS, run

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
USAGE: Any = {"include_usage": True}


class City(BaseModel):
    city: str


def plain() -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
    answer = raw.parse()
    return {
        "text": answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "request_id": raw.headers["x-request-id"],
    }


def stream() -> Any:
    text, tokens = "", None
    for chunk in client.chat.completions.create(model="m", messages=MESSAGES, stream=True, stream_options=USAGE):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return {"text": text, "tokens": tokens}


async def asynchronous() -> Any:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as waiting:
        text, tokens = "", None
        options: Any = {"stream": True, "stream_options": USAGE}
        async for chunk in await waiting.chat.completions.create(model="m", messages=MESSAGES, **options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return {"text": text, "tokens": tokens}


def helper() -> Any:
    with client.chat.completions.stream(model="m", messages=MESSAGES, stream_options=USAGE) as events:
        answer = events.get_final_completion()
    return {"text": answer.choices[0].message.content, "tokens": answer.usage.completion_tokens}


def calls() -> Any:
    answer = client.chat.completions.create(model="m@calls", messages=MESSAGES, tools=TOOLS)
    call = answer.choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def streamed_calls() -> Any:
    with client.chat.completions.stream(model="m@calls", messages=MESSAGES, tools=TOOLS) as events:
        call = events.get_final_completion().choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def parsed() -> Any:
    answer = client.chat.completions.parse(model="m@json", messages=MESSAGES, response_format=City)
    return {"city": answer.choices[0].message.parsed.city}


def picture() -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=PICTURE)
    return {"text": raw.parse().choices[0].message.content, "request_id": raw.headers["x-request-id"]}


def responses() -> Any:
    answer = client.responses.create(model="m", input="hi there")
    return {"text": answer.output_text, "tokens": answer.usage.output_tokens}


def streamed_responses() -> Any:
    with client.responses.stream(model="m", input="hi there") as events:
        answer = events.get_final_response()
    return {"text": answer.output_text, "tokens": answer.usage.output_tokens}


def parsed_responses() -> Any:
    return {"city": client.responses.parse(model="m@json", input="hi", text_format=City).output_parsed.city}


def refused() -> Any:
    try:
        client.chat.completions.create(model="unknown", messages=MESSAGES)
    except openai.APIStatusError as error:
        return {
            "kind": type(error).__name__,
            "status": error.status_code,
            "code": error.code,
            "request_id": error.request_id,
        }


def broken() -> Any:
    text = ""
    try:
        for chunk in client.chat.completions.create(model=BROKEN_MODEL, messages=MESSAGES, stream=True):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
    except openai.APIError as error:
        return {"text": text, "code": error.code}


def cancelled() -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m@slow-chunks", messages=MESSAGES, stream=True)
    seen = 0
    with raw.parse() as chunks:
        for chunk in chunks:
            seen += bool(chunk.choices and chunk.choices[0].delta.content)
            if seen == 5:
                break
    return {"seen": seen, "request_id": raw.headers["x-request-id"]}


run(
    plain,
    stream,
    asynchronous,
    helper,
    calls,
    streamed_calls,
    parsed,
    picture,
    responses,
    streamed_responses,
    parsed_responses,
    refused,
    broken,
    cancelled,
)
