"""Which draft model a request may use: the allow-list of the model, narrowed by the key. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from policies.refusal import Refusal

Mode = Literal["enabled", "disabled", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
MODE_HEADER = "X-Speculative-Decoding"
DRAFT_HEADER = "X-Draft-Model"


@dataclass(frozen=True, slots=True)
class Speculation:
    """What to ask of the backend. `draft` is None when speculation is disabled or the model has no draft to offer."""

    mode: Mode
    draft: str | None


def allowed_drafts(allowed: Sequence[str], key_drafts: Collection[str] | None) -> tuple[str, ...]:
    """The model's drafts that this key may name, in the order of the configuration. `None`: all of them."""
    return tuple(allowed) if key_drafts is None else tuple(name for name in allowed if name in key_drafts)


def choose_draft(
    mode_header: str | None,
    draft_header: str | None,
    *,
    model: str,
    allowed: Sequence[str],
    default: str | None,
    key_drafts: Collection[str] | None,
    route_default_mode: Mode = "auto",
) -> Speculation:
    """The speculation that the two headers ask for. The draft is checked whenever it is named, also when disabled.

    No draft named: the model's default, or the first one that the key may use. Raises Refusal 400
    `speculative_model_not_supported` that names the allowed drafts, or `invalid_speculative_mode`.
    """
    mode = _mode(mode_header, route_default_mode)
    offered = allowed_drafts(allowed, key_drafts)
    draft = draft_header.strip() if draft_header is not None else None
    if draft is not None and draft not in offered:
        raise _not_supported(draft, model, offered)
    if mode == "disabled":
        return Speculation("disabled", None)
    if draft is None:
        draft = default if default in offered else next(iter(offered), None)
    return Speculation(mode, draft)


def _mode(header: str | None, route_default: Mode) -> Mode:
    if header is None:
        return route_default
    mode = header.strip().lower()
    if mode not in MODES:
        raise Refusal(
            400,
            "invalid_request_error",
            "invalid_speculative_mode",
            f"{MODE_HEADER} must be one of {', '.join(MODES)}; got {header[:64]!r}.",
            param=MODE_HEADER,
        )
    return mode


def _not_supported(draft: str, model: str, offered: tuple[str, ...]) -> Refusal:
    choice = f"Allowed draft models: {', '.join(offered)}." if offered else "This model allows no draft model."
    return Refusal(
        400,
        "invalid_request_error",
        "speculative_model_not_supported",
        f"The draft model {draft[:128]!r} is not supported for {model!r}. {choice}",
        param=DRAFT_HEADER,
    )
