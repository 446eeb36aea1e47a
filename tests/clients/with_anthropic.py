"""Every scenario with the real `anthropic` package."""

from __future__ import annotations

from typing import Any

import anthropic
from scenarios import API_KEY, IMAGE, MESSAGES, PARAMETERS, ROOT_URL, run

client = anthropic.Anthropic(base_url=ROOT_URL, api_key=API_KEY, max_retries=0)
TOOLS: Any = [{"name": "weather", "input_schema": PARAMETERS}]


def plain() -> Any:
    raw = client.messages.with_raw_response.create(model="m", max_tokens=100, messages=MESSAGES)
    answer = raw.parse()
    return {
        "text": answer.content[0].text,
        "tokens": answer.usage.output_tokens,
        "request_id": raw.headers["request-id"],
    }


def stream() -> Any:
    with client.messages.stream(model="m", max_tokens=100, messages=MESSAGES) as events:
        answer = events.get_final_message()
    return {"text": answer.content[0].text, "tokens": answer.usage.output_tokens}


async def asynchronous() -> Any:
    async with anthropic.AsyncAnthropic(base_url=ROOT_URL, api_key=API_KEY, max_retries=0) as waiting:
        answer = await waiting.messages.create(model="m", max_tokens=100, messages=MESSAGES)
        return {"text": answer.content[0].text, "tokens": answer.usage.output_tokens}


def calls() -> Any:
    answer = client.messages.create(model="m@calls", max_tokens=100, messages=MESSAGES, tools=TOOLS)
    return {"name": answer.content[0].name, "arguments": answer.content[0].input}


def streamed_calls() -> Any:
    with client.messages.stream(model="m@calls", max_tokens=100, messages=MESSAGES, tools=TOOLS) as events:
        call = events.get_final_message().content[0]
    return {"name": call.name, "arguments": call.input}


def picture() -> Any:
    source = {"type": "base64", "media_type": "image/gif", "data": IMAGE.partition(",")[2]}
    content: Any = [{"type": "text", "text": "what is it"}, {"type": "image", "source": source}]
    raw = client.messages.with_raw_response.create(
        model="m", max_tokens=100, messages=[{"role": "user", "content": content}]
    )
    return {"text": raw.parse().content[0].text, "request_id": raw.headers["request-id"]}


def refused() -> Any:
    try:
        client.messages.create(model="unknown", max_tokens=100, messages=MESSAGES)
    except anthropic.APIStatusError as error:
        code = str(error.body["error"]["message"]).partition(":")[0]
        return {
            "kind": type(error).__name__,
            "status": error.status_code,
            "code": code,
            "request_id": error.request_id,
        }


def cancelled() -> Any:
    seen = 0
    with client.messages.stream(model="m@slow-chunks", max_tokens=100, messages=MESSAGES) as events:
        for _ in events.text_stream:
            seen += 1
            if seen == 5:
                break
        request_id = events.response.headers["request-id"]
    return {"seen": seen, "request_id": request_id}


run(plain, stream, asynchronous, calls, streamed_calls, picture, refused, cancelled)
