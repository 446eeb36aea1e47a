"""One frozen Settings from a YAML file and the environment. Every path in it is absolute; every secret is resolved.

`load_settings` is the only way in. It raises SettingsError, whose lines name the file, the line, the key and what is
allowed there. `base_dir` is what relative paths are relative to; TallyGate's own files lie in `base_dir/data`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from ledger.routes import MAX_WEIGHT
from proxy.settings_checks import check
from proxy.yaml_source import DecimalText, Source, SourceError, compose, decode, read

SettingsError = SourceError

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]

DEFAULT_CONFIG = """\
backend:
  target: demo
  drafts: {qwen-0.5b: demo, llama-3.2-1b: demo, gpt2-small: demo}
models:
  deepseek-v3.2:
    deployments: [{to: backend}]
    drafts: [qwen-0.5b, llama-3.2-1b, gpt2-small]
    default_draft: qwen-0.5b
    price: {currency: USD, input: "0.28", cache_read: "0.028", output: "0.42"}
"""
"""What `tallygate serve` runs when no file is given: the bundled pair, no upstream."""


class Server(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Port = 8000
    workers: AtLeastOne = 1
    max_body_mb: AtLeastOne = 32
    drain_s: Annotated[int, msgspec.Meta(ge=1, le=3_600)] = 5
    """How long running requests may go on after SIGTERM, before they are cut and settled for what they delivered."""
    key_secret: str | None = None
    """The secret under which API keys are hashed; None: generated once in `data/key-secret`."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of balancers that say truly, in X-Forwarded-For, whose request they pass on."""

    def share(self, most: int) -> int:
        """Of a bound on what a host does at once: what one worker may do."""
        return max(1, most // self.workers)


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    database: str = "sqlite:///data/tallygate.db"
    counters: str = "memory"
    journal_dir: str = "data/journal"

    @property
    def journal_path(self) -> Path:
        return Path(self.journal_dir)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    on_outage: Literal["local", "refuse"] = "local"
    """While shared counters do not answer: each worker counts its share of every limit, or what has limits gets 503."""


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """The local engine. With `url` it runs elsewhere and is not started here."""

    target: str = "demo"
    drafts: dict[str, str] = {}
    max_batch: AtLeastOne = 8
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    host: str = "127.0.0.1"
    port: Port | None = None
    """None: 8001, or any free port when that is taken."""
    url: str | None = None

    @property
    def base_url(self) -> str:
        """With `/v1`, as an upstream's."""
        return (self.url or f"http://{self.host}:{self.port or 8001}/v1").rstrip("/")


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A GET of the server's own path: two failures in a row take the place out of its routes, one success in."""

    path: str = "/health"
    interval_s: Seconds = 5.0
    timeout_s: Seconds = 2.0


class Upstream(msgspec.Struct, frozen=True, kw_only=True):
    base_url: str
    api_key: str | None = None
    kind: Literal["openai"] = "openai"
    native: tuple[Literal["responses", "messages"], ...] = ()
    """Which of these it speaks itself; the others are translated to chat completions for it."""
    connect_timeout_s: Seconds = 10.0
    first_byte_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 60.0
    read_timeout_s: Seconds = 120.0
    max_concurrency: AtLeastOne = 64
    tokenizer: str | None = None
    retries: Annotated[int, msgspec.Meta(ge=0, le=5)] = 0
    """How often the same place is asked again before the first byte, before the next one is."""
    retry_on: tuple[Literal["connect", "busy", "broken"], ...] = ("connect", "busy")
    """`broken` (5xx, nonsense, a reset) may have cost a generation already."""
    health_check: HealthCheck | None = None
    metrics: str | None = None
    """The path of its Prometheus metrics, below the server's root: acceptance and utilisation are read there."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Per 1M tokens, as decimal text. Cache prices default to `input`, reasoning to `output`."""

    currency: Literal["USD", "CNY"] = "USD"
    input: DecimalText
    output: DecimalText
    cache_read: DecimalText | None = None
    cache_write: DecimalText | None = None
    output_reasoning: DecimalText | None = None


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One place that serves a model: `to` is `backend` or an upstream's name."""

    to: str
    model: str | None = None
    """The name under which that place knows the model; None: the same name."""
    weight: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)] = 100
    cost: Price | None = None
    """What the provider charges us."""
    draft: str | None = None
    """The draft that it always speculates with; requests that name this draft go there."""


Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Ramp(msgspec.Struct, frozen=True, kw_only=True):
    """Raise a deployment's share by steps, each held for so long, while errors, acceptance and P99 hold; else take all
    of it back at once."""

    deployment: str
    steps: tuple[Annotated[int, msgspec.Meta(ge=1, le=100)], ...] = (10, 25, 50, 75, 90)
    hold_s: Seconds = 3600.0
    min_requests: AtLeastOne = 100
    """Fewer say nothing: the step goes on."""
    max_error_rate: Share = 0.02
    min_acceptance_rate: Share = 0.70
    min_draft_tokens: AtLeastOne = 1_000
    max_p99_ratio: Annotated[float, msgspec.Meta(gt=0)] = 1.2
    """Of the slowest other deployment's P99."""
    max_p99_ms: AtLeastOne | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    deployments: tuple[Deployment, ...]
    sticky_by: Literal["team", "key", "user", "none"] = "team"
    fallback: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    default_draft: str | None = None
    speculative: Literal["auto", "enabled", "disabled"] = "auto"
    price: Price | None = None
    context_tokens: AtLeastOne | None = None
    max_output_tokens: AtLeastOne | None = None
    ramp: Ramp | None = None
    on_hangup: Literal["cancel", "finish"] = "cancel"
    """When a client leaves its stream: stop the upstream, or read on to learn what it really used."""
    finish_s: Seconds = 30.0
    """How long `finish` reads on at most."""
    surcharges: Literal["refuse", "pass"] = "refuse"
    """What providers charge extra for, and no price here covers: `service_tier: priority`, `web_search_options`."""


class Fx(msgspec.Struct, frozen=True, kw_only=True):
    USD_CNY: DecimalText = "7.3"


class Billing(msgspec.Struct, frozen=True, kw_only=True):
    timezone: str = "Asia/Shanghai"


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    secret: str | None = None
    events: tuple[Literal["budget", "acceptance", "balance"], ...] = ("budget", "acceptance", "balance")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    server: Server = Server()
    storage: Storage = Storage()
    limits: Limits = Limits()
    admin_token: str | None = None
    """None: generated at the first start."""
    backend: Backend | None = None
    upstreams: dict[str, Upstream] = {}
    models: dict[str, Model] = {}
    fx: Fx = Fx()
    billing: Billing = Billing()
    webhooks: tuple[Webhook, ...] = ()
    _base_dir: str = "."
    _source: str = "the built-in configuration"

    @property
    def base_dir(self) -> Path:
        return Path(self._base_dir)

    @property
    def data_dir(self) -> Path:
        """TallyGate's own files: keys, converted weights, the demo key."""
        return self.base_dir / "data"

    @property
    def metrics_dir(self) -> Path:
        """What the processes of this host have counted."""
        return self.data_dir / "metrics"

    @property
    def source(self) -> str:
        """The configuration file, in words."""
        return self._source


ADMIN_TOKEN_VARIABLE = "TALLYGATE_ADMIN_TOKEN"
SECRETS_FOR_OTHERS = ("admin_token", "upstreams.*.api_key", "webhooks[[]*].secret")
"""What only those need whom requests reach, or who ask upstreams and webhooks."""


def load_settings(
    path: Path | str | None,
    data_dir: Path | str = ".",
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    asks_others: bool = True,
) -> Settings:
    """Read, type-check and cross-check a configuration.

    path: a YAML file, or None for the bundled pair. data_dir: the base of relative paths.
    overrides: values from the command line by dotted path, such as {"server.port": 9000}; None values are skipped.
    asks_others: False where only the ledger is worked on; secrets for upstreams and webhooks need not be there then.
    Raises SettingsError.
    """
    environ = os.environ if environ is None else environ
    base = Path(data_dir).expanduser().absolute()
    optional = frozenset({"admin_token"})
    if path is None:
        source = compose("the built-in configuration", DEFAULT_CONFIG, base, environ, optional)
    else:
        source = read(Path(path), base, environ, optional)
    source.unneeded_secrets = () if asks_others else SECRETS_FOR_OTHERS
    _override(source, {key: value for key, value in (overrides or {}).items() if value is not None})
    settings = decode(source, Settings, source.root)
    if source.shapeless:
        source.raise_if_any()
    if settings.admin_token is None and environ.get(ADMIN_TOKEN_VARIABLE):
        settings = msgspec.structs.replace(settings, admin_token=environ[ADMIN_TOKEN_VARIABLE])
    check(settings, source.complain_of_what_is_known)
    source.raise_if_any()
    return _absolute(settings, base, source.name)


def _override(source: Source, overrides: Mapping[str, Any]) -> None:
    """Put command-line values into the document, so that they meet the same checks."""
    if source.root is None or source.root.tag == "tag:yaml.org,2002:null":
        source.root = yaml.compose("{}", yaml.SafeLoader)
    for dotted, value in overrides.items():
        node = source.root
        *sections, name = dotted.split(".")
        source.lines[dotted] = 0
        for section in sections:
            node = _child(node, section)
        if isinstance(node, yaml.MappingNode):
            node.value = [pair for pair in node.value if pair[0].value != name]
            node.value.append(
                (_text_node(name, node), yaml.compose(msgspec.json.encode(value).decode(), yaml.SafeLoader))
            )


def _child(node: yaml.Node | None, name: str) -> yaml.Node | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == name:
            found: yaml.Node = value
            return found
    child = yaml.compose("{}", yaml.SafeLoader)
    node.value.append((_text_node(name, node), child))
    return child


def _text_node(text: str, near: yaml.Node) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, near.start_mark, near.end_mark)


def _absolute(settings: Settings, base: Path, source: str) -> Settings:
    def at(path: str) -> str:
        return os.fspath(base / Path(path).expanduser())

    storage = settings.storage
    database = storage.database
    if database.startswith("sqlite:///"):
        database = "sqlite:///" + at(database.removeprefix("sqlite:///"))
    backend = settings.backend
    if backend is not None:
        drafts = {name: at(model) if model[:1] in (".", "~") else model for name, model in backend.drafts.items()}
        target = at(backend.target) if backend.target[:1] in (".", "~") else backend.target
        backend = msgspec.structs.replace(backend, target=target, drafts=drafts)
    upstreams = {
        name: msgspec.structs.replace(upstream, tokenizer=at(upstream.tokenizer)) if upstream.tokenizer else upstream
        for name, upstream in settings.upstreams.items()
    }
    return msgspec.structs.replace(
        settings,
        storage=msgspec.structs.replace(storage, database=database, journal_dir=at(storage.journal_dir)),
        backend=backend,
        upstreams=upstreams,
        _base_dir=os.fspath(base),
        _source=source,
    )
