"""From command-line settings to a running engine: load, check, calibrate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from backend.adaptive import LengthPolicy
from backend.calibration import measure_draw, measure_steps
from backend.costs import StepCosts
from backend.demo.draft import load_demo_draft
from backend.drafts import Draft, ModelDraft, NgramDraft, NgramThenModelDraft
from backend.engine import Engine
from backend.errors import DraftNotSupported
from backend.grammar import GrammarCompiler
from backend.graphs import calibrate_fixed
from backend.head_draft import HeadDraft
from backend.loading import (
    BUNDLED_DRAFT,
    BUNDLED_DRAFT_ACCEPTANCE,
    BUNDLED_DRAFT_LABEL,
    choose_device,
    choose_dtype,
    common_vocabulary,
    load_model,
    load_tokenizer,
    resolve_weights,
    stop_tokens_of,
    weights_label,
)
from backend.model import PackedModel
from backend.pages import use_large_pages
from backend.speculate import Rates
from backend.text import Tokenizer

_log = structlog.get_logger("backend.service")
_TARGET_SIZES = [1, 2, 3, 4, 5, 8, 16, 24, 40, 72]
_DRAFT_ROWS = [1, 2, 4, 8]
HOT_TOKENS = "hot_tokens.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """What `python -m backend` was asked for. drafts: name → weights, `ngram`, or `ngram+weights`."""

    target: str
    drafts: Mapping[str, str]
    served_models: tuple[str, ...]
    data_dir: Path
    max_batch: int = 8
    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    queue_limit: int = 256
    chunk_tokens: int = 256
    draft_length: int | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """A loaded engine and what people are told about it."""

    engine: Engine
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    weights: str
    drafts: Mapping[str, str]
    grammars: GrammarCompiler

    @property
    def vocabulary(self) -> int:
        return self.engine.target.vocabulary

    @property
    def context_tokens(self) -> int:
        return self.engine.target.cache.capacity


def load_service(settings: Settings, progress: Callable[[str], None]) -> Service:
    """Load the target and the drafts, and measure their steps. Raises BackendError with what to do next."""
    import torch

    started = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    progress("loading the target")
    directory = resolve_weights(settings.target, settings.data_dir, progress)
    model = load_model(directory, dtype, device)
    tokenizer = load_tokenizer(directory)
    longest = int(getattr(model.config, "max_position_embeddings", 4096))
    capacity = min(settings.context or min(longest, 8192), longest)
    target = PackedModel(model, slots=settings.max_batch, capacity=capacity)
    progress("loading the drafts")
    loader = _DraftLoader(settings, target, model, tokenizer)
    drafts = {name: loader.load(name, spec) for name, spec in settings.drafts.items()}
    del model, loader  # the lean forward pass has its own weights
    if device.type == "cpu":
        use_large_pages()
    progress("measuring step times")
    draw_seconds = measure_draw(target) if drafts and settings.draft_length is None else 0.0
    costs = _target_costs(target, settings, bool(drafts))
    policy = LengthPolicy(costs, fixed=settings.draft_length, draw_seconds=draw_seconds)
    policy.pair_rates.update(
        {name: Rates(*BUNDLED_DRAFT_ACCEPTANCE) for name, spec in settings.drafts.items() if spec == "demo"}
    )
    engine = Engine(
        target,
        tokenizer.decode,
        drafts,
        policy=policy,
        queue_limit=settings.queue_limit,
        chunk_tokens=settings.chunk_tokens,
    )
    if engine.fixed is not None and drafts and settings.draft_length is None:
        progress("capturing rounds")
        calibrate_fixed(engine.fixed, policy, {id(draft): draft for draft in drafts.values()}.values())
    labels = {name: draft.weights for name, draft in drafts.items()}
    _log.info("engine_ready", weights=settings.target, drafts=labels, seconds=round(time.monotonic() - started, 1))
    stop_tokens = stop_tokens_of(directory, tokenizer)
    grammars = GrammarCompiler(tokenizer, target.vocabulary, stop_tokens)
    return Service(engine, tokenizer, stop_tokens, weights_label(settings.target), labels, grammars)


def _target_costs(target: PackedModel, settings: Settings, speculative: bool) -> StepCosts:
    if not speculative or settings.draft_length is not None:
        return StepCosts()
    return measure_steps(target, [size for size in _TARGET_SIZES if size <= settings.max_batch * 9])


class _DraftLoader:
    """Loads each distinct draft once; several names may share one."""

    def __init__(self, settings: Settings, target: PackedModel, target_model: Any, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._target = target
        self._target_model = target_model
        self._tokenizer = tokenizer
        self._loaded: dict[str, Draft] = {}

    def load(self, name: str, spec: str) -> Draft:
        if spec == "ngram" or (spec == "demo" and not BUNDLED_DRAFT.is_dir()):
            return NgramDraft()
        if spec == "demo" and self._target.device.type == "cpu":  # captured GPU rounds know one kind of draft at a time
            return NgramThenModelDraft(self._model(name, spec))
        if spec.startswith("ngram+"):
            return NgramThenModelDraft(self._model(name, spec.removeprefix("ngram+")))
        return self._model(name, spec)

    def _model(self, name: str, spec: str) -> Draft:
        if spec not in self._loaded:
            if spec == "demo":
                self._loaded[spec] = self._bundled(name)
                return self._loaded[spec]
            directory = resolve_weights(spec, self._settings.data_dir)
            model = load_model(directory, self._target.dtype, self._target.device)
            theirs = load_tokenizer(directory)
            width = common_vocabulary(self._tokenizer.vocabulary, theirs.vocabulary, name)
            width = min(width, int(model.config.vocab_size), self._target.vocabulary)
            self._loaded[spec] = self._measured(directory, model, spec, width)
        return self._loaded[spec]

    def _measured(self, directory: Path, model: Any, spec: str, width: int) -> ModelDraft:
        """A draft model with its step times. hot_tokens.json in its directory (a list of token ids) cuts its head."""
        import torch

        hot = None
        if (directory / HOT_TOKENS).is_file():
            ids = sorted({token for token in json.loads((directory / HOT_TOKENS).read_text()) if 0 <= token < width})
            hot = torch.tensor(ids, dtype=torch.int64)
        slots, capacity = self._settings.max_batch, self._target.cache.capacity
        packed = PackedModel(model, slots=slots, capacity=capacity, head_rows=hot)
        draft = ModelDraft(packed, spec, width, hot)
        draft.calibrate(measure_steps(packed, [rows for rows in _DRAFT_ROWS if rows <= slots], width))
        return draft

    def _bundled(self, name: str) -> Draft:
        """The bundled draft, which shares the target's embedding and head."""
        try:
            draft = HeadDraft(load_demo_draft(self._target_model, BUNDLED_DRAFT), BUNDLED_DRAFT_LABEL)
        except ValueError as error:
            raise DraftNotSupported(
                f"the draft {name} is the bundled one, made for the bundled target: {error}"
            ) from error
        draft.calibrate(StepCosts.measured({rows: draft.measure(rows) for rows in (*_DRAFT_ROWS, 2 * _DRAFT_ROWS[-1])}))
        return draft
