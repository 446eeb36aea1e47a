"""The draft allow-list, as the wire sees it."""

from __future__ import annotations

from typing import Any

import pytest

from policies.drafts import Speculation, choose_draft
from policies.refusal import Refusal

ALLOWED = ("qwen-0.5b", "llama-3.2-1b", "gpt2-small")


def choose(mode: str | None = None, draft: str | None = None, **more: Any) -> Speculation:
    options = {"model": "deepseek-v3.2", "allowed": ALLOWED, "default": "qwen-0.5b", "key_drafts": None, **more}
    return choose_draft(mode, draft, **options)


def test_the_reference_request_gets_its_draft() -> None:
    assert choose("enabled", "qwen-0.5b") == Speculation("enabled", "qwen-0.5b")


@pytest.mark.parametrize("mode", [None, "enabled", "auto", "disabled"])
def test_an_unknown_draft_is_refused_whatever_the_mode_and_the_allowed_ones_are_named(mode: str | None) -> None:
    with pytest.raises(Refusal) as refused:
        choose(mode, "nonsense")
    assert (refused.value.status, refused.value.code) == (400, "speculative_model_not_supported")
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == "X-Draft-Model"
    assert all(name in refused.value.message for name in ("nonsense", "deepseek-v3.2", *ALLOWED))


def test_without_headers_the_route_decides_and_the_default_draft_serves() -> None:
    assert choose() == Speculation("auto", "qwen-0.5b")
    assert choose(route_default_mode="disabled") == Speculation("disabled", None)
    assert choose("enabled") == Speculation("enabled", "qwen-0.5b")


def test_disabled_means_no_draft_even_when_one_is_named() -> None:
    assert choose("disabled", "gpt2-small") == Speculation("disabled", None)


def test_modes_are_read_without_regard_to_case_and_others_are_refused() -> None:
    assert choose(" Enabled ") == Speculation("enabled", "qwen-0.5b")
    with pytest.raises(Refusal) as refused:
        choose("on")
    assert refused.value.status == 400
    assert refused.value.param == "X-Speculative-Decoding"
    assert "enabled, disabled, auto" in refused.value.message


def test_a_key_narrows_the_drafts_and_never_widens_them() -> None:
    only: dict[str, Any] = {"key_drafts": frozenset({"gpt2-small", "elsewhere"})}
    assert choose("enabled", **only) == Speculation("enabled", "gpt2-small")
    with pytest.raises(Refusal) as refused:
        choose("enabled", "qwen-0.5b", **only)
    assert "Allowed draft models: gpt2-small." in refused.value.message
    with pytest.raises(Refusal):
        choose("enabled", "elsewhere", **only)


def test_a_model_without_drafts_answers_without_speculation() -> None:
    none: dict[str, Any] = {"allowed": (), "default": None}
    assert choose("enabled", **none) == Speculation("enabled", None)
    with pytest.raises(Refusal) as refused:
        choose(None, "qwen-0.5b", **none)
    assert "allows no draft" in refused.value.message


@pytest.mark.parametrize("draft", ["", "QWEN-0.5B", "qwen-0.5b,gpt2-small", "x" * 10_000])
def test_only_exact_names_pass_and_messages_stay_short(draft: str) -> None:
    with pytest.raises(Refusal) as refused:
        choose("enabled", draft)
    assert len(refused.value.message) < 400
