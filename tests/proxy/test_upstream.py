"""Promises about the client towards upstreams: it keeps bytes, keeps connections, and lets go at once."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from proxy.http1 import STALE_WITHIN_S, ConnectionLost
from proxy.upstream import Answer, Patience, Upstream, UpstreamFailed, failure_of, read_all
from tests.proxy.lag import Lag, assert_in_time
from tests.services import free_port
from tests.upstream.process import FakeUpstream


def upstream_of(fake: FakeUpstream, **patience: float) -> Upstream:
    return Upstream("fake", fake.base_url, "sk-secret", Patience(**patience))


async def ask(client: Upstream, fault: str = "none", **fields: object) -> Answer:
    body = json.dumps({"model": f"m@{fault}", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    return await client.post(b"/chat/completions", body, b"x-request-id: r-%b\r\n" % fault.encode())


@pytest.mark.parametrize(
    "fault",
    ["none", "close-framed", "length-framed", "no-keep-alive", "gzip", "deflate", "raw-deflate", "slow-headers"],
)
async def test_a_whole_answer_is_read_however_it_is_framed_or_packed(upstream: FakeUpstream, fault: str) -> None:
    client = upstream_of(upstream)
    for _ in range(2):
        answer = await ask(client, fault)
        body = json.loads(await read_all(answer))
        assert answer.status == 200
        assert body["choices"][0]["message"]["content"].startswith("the bill")
    client.close()


@pytest.mark.parametrize("fault", ["short-body", "cut", "reset-midway"])
async def test_a_body_that_breaks_off_is_never_taken_for_a_whole_one(upstream: FakeUpstream, fault: str) -> None:
    client = upstream_of(upstream)
    answer = await ask(client, fault, stream=True)
    with pytest.raises(ConnectionLost):
        await read_all(answer)
    client.close()


@pytest.mark.parametrize("fault", ["close", "reset", "wrong-encoding"])
async def test_no_answer_is_a_broken_upstream(upstream: FakeUpstream, fault: str) -> None:
    client = upstream_of(upstream)
    with pytest.raises(UpstreamFailed) as caught:
        await read_all(await ask(client, fault))
    assert (caught.value.kind, caught.value.error.status) == ("broken", 502)
    client.close()


async def test_nobody_listening_is_told_apart_from_a_broken_answer() -> None:
    client = Upstream("gone", f"http://127.0.0.1:{free_port()}/v1", None, Patience())
    with pytest.raises(UpstreamFailed) as caught:
        await ask(client)
    assert caught.value.kind == "connect"


async def test_closing_a_stream_ends_the_generation_within_100_ms(upstream: FakeUpstream) -> None:
    client = upstream_of(upstream)
    closed = []
    async with Lag() as lag:
        for number in range(1, 4):
            answer = await ask(client, "endless", stream=True)
            await answer.chunk()
            answer.close()
            closed.append(time.time())
            entries = await asyncio.to_thread(upstream.wait_for_entries, number)
    assert {entry["outcome"] for entry in entries} == {"client_gone"}
    assert_in_time([entry["ended"] - at for entry, at in zip(entries, closed, strict=True)], lag.seconds)


async def test_cancelling_a_wait_for_the_first_byte_closes_the_connection(upstream: FakeUpstream) -> None:
    client = upstream_of(upstream)
    closed = []
    async with Lag() as lag:
        for number in range(1, 4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await ask(client, "hang")
            closed.append(time.time())
            entries = await asyncio.to_thread(upstream.wait_for_entries, number)
    assert_in_time([entry["ended"] - at for entry, at in zip(entries, closed, strict=True)], lag.seconds)


async def test_a_hundred_requests_at_once_each_get_their_own_answer(upstream: FakeUpstream) -> None:
    client = upstream_of(upstream)
    answers = await asyncio.gather(*(ask(client, "none", max_tokens=n % 9 + 1) for n in range(100)))
    bodies = [json.loads(await read_all(answer)) for answer in answers]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [n % 9 + 1 for n in range(100)]
    client.close()


async def test_a_connection_is_kept_for_the_next_request_plain_or_streamed(upstream: FakeUpstream) -> None:
    client = upstream_of(upstream)
    for stream in (False, True, False, True):
        await read_all(await ask(client, stream=stream))
        await asyncio.sleep(0)
        assert len(client._origin._idle) == 1
    client.close()


async def test_a_kept_connection_that_the_server_closed_is_replaced(upstream: FakeUpstream) -> None:
    client = upstream_of(upstream)
    await read_all(await ask(client))
    upstream.stop()
    upstream.start()
    assert (await ask(client)).status == 200
    client.close()


class Scripted:
    """A server that answers each request with the next of some bytes and then waits: None closes after a while."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.requests = 0
        self.hangups = asyncio.Event()

    async def __aenter__(self) -> Upstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._client = Upstream("scripted", f"http://127.0.0.1:{port}/v1", None, Patience())
        return self._client

    async def __aexit__(self, *exc: object) -> None:
        self._client.close()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self._answers:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            self.requests += 1
            answer = self._answers.pop(0)
            if answer is None:
                await asyncio.sleep(STALE_WITHIN_S + 0.2)
                break
            writer.write(answer)
        else:
            await reader.read()
            self.hangups.set()
        writer.close()


SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def test_a_kept_connection_that_breaks_during_the_generation_never_starts_a_second_one() -> None:
    server = Scripted(SHORT, None, SHORT)
    async with server as client:
        await read_all(await client.post(b"/x", b""))
        with pytest.raises(UpstreamFailed) as caught:
            await client.post(b"/x", b"")
        assert caught.value.kind == "broken"
        assert server.requests == 2


async def test_half_a_head_behind_an_answer_does_not_begin_the_next_one() -> None:
    server = Scripted(SHORT + b"HTTP/1.1 200 OK\r\nX:", b"HTTP/1.1 202 Accepted\r\ncontent-length: 2\r\n\r\n[]")
    async with server as client:
        assert await read_all(await client.post(b"/x", b"")) == b"{}"
        second = await client.post(b"/x", b"")
        assert (second.status, await read_all(second)) == (202, b"[]")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Oops\r\ncontent-length: 100\r\n\r\nhalf an error page",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 100\r\n\r\nthis is no gzip at all",
    ],
    ids=["stalls", "damaged"],
)
async def test_a_body_that_is_given_up_takes_its_connection_with_it(answer: bytes) -> None:
    server = Scripted(answer)
    async with server as client:
        with pytest.raises((TimeoutError, ConnectionLost)):
            async with asyncio.timeout(0.2):
                await read_all(await client.post(b"/x", b""))
        await asyncio.wait_for(server.hangups.wait(), 30)


def test_the_callers_own_mistakes_pass_through_and_credentials_of_ours_do_not() -> None:
    body = b'{"error": {"message": "no", "type": "t", "param": null, "code": "c"}}'
    for status in (400, 404, 413, 422, 429):
        failed = failure_of("up", status, {b"retry-after": b"7"}, body)
        assert (failed.error.status, failed.error.body()) == (status, body)
        assert (b"retry-after", b"7") in failed.error.headers()
    for status in (401, 403, 500, 502, 503, 302, 204):
        failed = failure_of("up", status, {}, body)
        assert (failed.kind, failed.error.status, failed.error.code) == ("broken", 502, "upstream_error")
        assert (b"x-should-retry", b"false") in failed.error.headers()


def test_an_error_page_that_is_no_error_object_is_wrapped() -> None:
    assert json.loads(failure_of("up", 400, {}, b"<html>").error.body())["error"]["type"] == "invalid_request_error"
