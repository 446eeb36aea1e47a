"""Every scenario with the real `langchain-openai` package."""

from __future__ import annotations

from typing import Any

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from scenarios import API_KEY, BASE_URL, BROKEN_MODEL, PICTURE, TOOLS, run

ASK = "hi there"


class City(BaseModel):
    city: str


def model(name: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=BASE_URL, api_key=API_KEY, max_retries=0, include_response_headers=True, **options
    )


def plain() -> Any:
    answer = model("m").invoke(ASK)
    headers = answer.response_metadata["headers"]
    tokens = answer.usage_metadata["output_tokens"]
    return {"text": answer.content, "tokens": tokens, "request_id": headers["x-request-id"]}


def stream() -> Any:
    text, tokens = "", 0
    for chunk in model("m", stream_usage=True).stream(ASK):
        text += chunk.content
        tokens += (chunk.usage_metadata or {}).get("output_tokens", 0)
    return {"text": text, "tokens": tokens}


async def asynchronous() -> Any:
    text, tokens = "", 0
    async for chunk in model("m", stream_usage=True).astream(ASK):
        text += chunk.content
        tokens += (chunk.usage_metadata or {}).get("output_tokens", 0)
    return {"text": text, "tokens": tokens}


def calls() -> Any:
    call = model("m@calls").bind_tools(TOOLS).invoke(ASK).tool_calls[0]
    return {"name": call["name"], "arguments": call["args"]}


def streamed_calls() -> Any:
    whole: Any = None
    for chunk in model("m@calls").bind_tools(TOOLS).stream(ASK):
        whole = chunk if whole is None else whole + chunk
    return {"name": whole.tool_calls[0]["name"], "arguments": whole.tool_calls[0]["args"]}


def parsed() -> Any:
    return {"city": model("m@json").with_structured_output(City, method="json_schema").invoke(ASK).city}


def picture() -> Any:
    answer = model("m").invoke([HumanMessage(content=PICTURE[0]["content"])])
    return {"text": answer.content, "request_id": answer.response_metadata["headers"]["x-request-id"]}


def responses() -> Any:
    answer = model("m", use_responses_api=True).invoke(ASK)
    return {"text": answer.text, "tokens": answer.usage_metadata["output_tokens"]}


def refused() -> Any:
    try:
        model("unknown").invoke(ASK)
    except openai.APIStatusError as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        kind = "NotFoundError" if "NotFoundError" in kinds else kinds[0]
        return {"kind": kind, "status": error.status_code, "code": error.code, "request_id": error.request_id}


def broken() -> Any:
    text = ""
    try:
        for chunk in model(BROKEN_MODEL).stream(ASK):
            text += chunk.content
    except openai.APIError as error:
        return {"text": text, "code": error.code}


def cancelled() -> Any:
    seen, request_id = 0, None
    chunks = model("m@slow-chunks").stream(ASK)
    for chunk in chunks:
        request_id = request_id or chunk.response_metadata.get("headers", {}).get("x-request-id")
        seen += bool(chunk.content)
        if seen == 5:
            break
    chunks.close()
    return {"seen": seen, "request_id": request_id}


run(
    plain,
    stream,
    asynchronous,
    calls,
    streamed_calls,
    parsed,
    picture,
    responses,
    refused,
    broken,
    cancelled,
)
