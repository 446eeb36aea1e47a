"""Text comes out whole: no broken characters, no half stop strings, nothing twice."""

from __future__ import annotations

from backend.text import TextStream


def utf8(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(stream: TextStream, tokens: bytes) -> list[str]:
    found = []
    for token in tokens:
        if stream.push(token):
            break
        found.append(stream.take())
    stream.finish()
    return [*found, stream.take()]


def test_a_character_split_over_tokens_is_held_until_it_is_whole() -> None:
    text = "a你好é🎉b"
    found = pieces(TextStream(utf8), text.encode())
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)


def test_an_incomplete_tail_is_flushed_at_the_end() -> None:
    assert "".join(pieces(TextStream(utf8), "好".encode()[:2])) == "\ufffd"


def test_invalid_bytes_do_not_hold_the_stream_up_for_ever() -> None:
    stream = TextStream(utf8)
    for _ in range(40):
        stream.push(0x80)
    assert stream.take()


def test_the_prompts_tail_keeps_the_first_tokens_leading_space() -> None:
    def sentencepiece(tokens: list[int]) -> str:
        return " ".join(f"w{t}" for t in tokens)  # the first word loses its space, as in SentencePiece

    stream = TextStream(sentencepiece, context=[1, 2])
    stream.push(3)
    assert stream.take() == " w3"


def test_the_earliest_stop_string_wins_wherever_tokens_end() -> None:
    stream = TextStream(utf8, ("END", "nd"))
    found = "".join(pieces(stream, b"the end END of it"))
    assert found == "the e"
    assert stream.stopped


def test_a_stop_string_across_tokens_is_never_partly_sent() -> None:
    stream = TextStream(utf8, ("###",))
    sent = []
    for token in b"a##b###c":
        over = stream.push(token)
        sent.append(stream.take())
        assert "###".find("".join(sent)[-1:] or "x") != 0 or over
        if over:
            break
    assert "".join(sent) == "a##b"


def test_a_stop_string_made_whole_by_the_flushed_tail_still_counts() -> None:
    stream = TextStream(utf8, ("\ufffd",))
    assert "".join(pieces(stream, b"ok" + "好".encode()[:1])) == "ok"
    assert stream.stopped
