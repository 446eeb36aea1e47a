"""Every scenario with the real `litellm` package as a client."""

from __future__ import annotations

import json
from typing import Any

import litellm
from pydantic import BaseModel
from scenarios import API_KEY, BASE_URL, MESSAGES, PICTURE, TOOLS, run

litellm.enable_json_schema_validation = False


class City(BaseModel):
    city: str


def complete(name: str, messages: Any = MESSAGES, **options: Any) -> Any:
    target = {"model": f"openai/{name}", "api_base": BASE_URL, "api_key": API_KEY, "num_retries": 0, "max_retries": 0}
    return litellm.completion(messages=messages, **target, **options)


def request_id(answer: Any) -> str:
    headers = answer._hidden_params["additional_headers"]
    return headers["llm_provider-x-request-id"]


def plain() -> Any:
    answer = complete("m")
    return {
        "text": answer.choices[0].message.content,
        "tokens": answer.usage.completion_tokens,
        "request_id": request_id(answer),
    }


def stream() -> Any:
    text, tokens = "", None
    for chunk in complete("m", stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = getattr(chunk, "usage", None)
        tokens = usage.completion_tokens if usage else tokens
    return {"text": text, "tokens": tokens}


async def asynchronous() -> Any:
    target = {"model": "openai/m", "api_base": BASE_URL, "api_key": API_KEY, "max_retries": 0}
    answer = await litellm.acompletion(messages=MESSAGES, **target)
    return {"text": answer.choices[0].message.content, "tokens": answer.usage.completion_tokens}


def calls() -> Any:
    call = complete("m@calls", tools=TOOLS).choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def streamed_calls() -> Any:
    chunks = list(complete("m@calls", tools=TOOLS, stream=True))
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0].function
    return {"name": call.name, "arguments": json.loads(call.arguments)}


def parsed() -> Any:
    return {"city": json.loads(complete("m@json", response_format=City).choices[0].message.content)["city"]}


def picture() -> Any:
    answer = complete("m", PICTURE)
    return {"text": answer.choices[0].message.content, "request_id": request_id(answer)}


def refused() -> Any:
    try:
        complete("unknown")
    except litellm.exceptions.NotFoundError as error:
        code = "model_not_found" if "does not exist" in str(error) else str(error)
        return {"kind": "NotFoundError", "status": error.status_code, "code": code, "request_id": "not told"}


def cancelled() -> Any:
    seen = 0
    answer = complete("m@slow-chunks", stream=True)
    for chunk in answer:
        seen += bool(chunk.choices[0].delta.content)
        if seen == 5:
            break
    answer.completion_stream.close()
    return {"seen": seen, "request_id": request_id(answer)}


run(plain, stream, asynchronous, calls, streamed_calls, parsed, picture, refused, cancelled)
