"""A configuration is either accepted whole or refused with lines that say where and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.settings import Settings, SettingsError, load_settings

FULL = """\
server: {host: 0.0.0.0, port: 9000, workers: 2, max_body_mb: 8}
storage:
  database: sqlite:///data/tallygate.db
  counters: redis://localhost:6379/0
  journal_dir: data/journal
admin_token: env:ADMIN
backend:
  target: demo
  drafts: {qwen-0.5b: demo, gpt2-small: ngram}
upstreams:
  legacy: {base_url: https://api.example.com/v1, api_key: "file:secret.txt", connect_timeout_s: 3}
models:
  deepseek-v3.2:
    deployments:
      - {to: backend, weight: 90}
      - {to: legacy, model: gpt-4, weight: 10}
    sticky_by: team
    fallback: [legacy]
    drafts: [qwen-0.5b, gpt2-small]
    default_draft: qwen-0.5b
    price: {currency: USD, input: 0.28, cache_read: "0.028", output: "0.42"}
fx: {USD_CNY: "7.3"}
billing: {timezone: Asia/Shanghai}
webhooks: [{url: https://ops.example.com/hook, secret: env:ADMIN, events: [budget]}]
"""


def load(tmp_path: Path, text: str, **environ: str) -> Settings:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, tmp_path, environ=environ)


def refused(tmp_path: Path, text: str, **environ: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text, **environ)
    return [line.removeprefix(str(tmp_path) + "/") for line in caught.value.lines]


def test_the_documented_configuration_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("sk-upstream\n")
    settings = load(tmp_path, FULL, ADMIN="an-admin-token-of-some-length")
    assert settings.upstreams["legacy"].api_key == "sk-upstream"
    assert settings.upstreams["legacy"].connect_timeout_s == 3.0
    assert settings.admin_token == "an-admin-token-of-some-length"
    assert settings.models["deepseek-v3.2"].price is not None
    assert settings.models["deepseek-v3.2"].price.input == "0.28"
    assert settings.storage.database == f"sqlite:///{tmp_path}/data/tallygate.db"
    assert settings.storage.journal_path == tmp_path / "data/journal"


def test_the_configuration_in_the_readme_is_accepted(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    text = readme.partition("```yaml\n")[2].partition("```")[0]
    assert set(load(tmp_path, text, LEGACY_API_KEY="sk-upstream").upstreams) == {"legacy"}


def test_without_a_file_the_bundled_pair_serves_the_reference_model(tmp_path: Path) -> None:
    settings = load_settings(None, tmp_path, environ={})
    assert settings.backend is not None
    assert settings.upstreams == {}
    model = settings.models["deepseek-v3.2"]
    assert model.drafts == ("qwen-0.5b", "llama-3.2-1b", "gpt2-small")
    assert model.price is not None
    assert (model.price.input, model.price.output, settings.fx.USD_CNY) == ("0.28", "0.42", "7.3")


def test_an_unknown_key_names_its_line_and_the_allowed_ones(tmp_path: Path) -> None:
    lines = refused(tmp_path, "server:\n  host: 127.0.0.1\n  prt: 8000\n")
    assert lines == [
        "config.yaml:3: server.prt: unknown key; did you mean `port`? "
        "allowed here: host, port, workers, max_body_mb, drain_s, key_secret, trusted_proxies"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server: {workers: many}", "config.yaml:1: server.workers: expected a whole number, got 'many'"),
        ("server:\n  port: 70000", "config.yaml:2: server.port: 70000 is out of range"),
        ("server:\n  host: 5", "config.yaml:2: server.host: expected text, got '5'; put it in quotes"),
        ("server: [1]", "config.yaml:1: server: expected a mapping with: host, port"),
        ("models: {m: {deployments: {to: x}}}", "config.yaml:1: models.m.deployments: expected a list, got a mapping"),
        (
            "limits:\n  on_outage: refuse",
            "config.yaml:2: limits.on_outage: counters in memory are never away",
        ),
        (
            "server:\n  trusted_proxies: [10.0.0.0/8, balancer]",
            "config.yaml:2: server.trusted_proxies[1]: must be an address or a network",
        ),
        ("upstreams:\n  a: {api_key: x}", "config.yaml:2: upstreams.a: needs `base_url`"),
        (
            "upstreams:\n  a:\n    base_url: env:NOT_SET",
            "config.yaml:3: upstreams.a.base_url: the environment variable",
        ),
        ("upstreams:\n  a:\n    base_url: file:gone", "config.yaml:3: upstreams.a.base_url: cannot read"),
        ("fx: {USD_CNY: x}", "config.yaml:1: fx.USD_CNY: not a plain decimal number: 'x'"),
        ("billing: {timezone: Mars/Base}", "config.yaml:1: billing.timezone: no such time zone"),
        ("server:\n  workers: 2", "config.yaml:2: server.workers: 2 workers cannot share counters"),
        ("storage:\n  database: mysql://x", "config.yaml:2: storage.database: must begin with sqlite:///"),
        ("storage:\n  counters: shared", "config.yaml:2: storage.counters: must be `memory` or a URL"),
        ("storage:\n  counters: redis://h:6379/abc", "config.yaml:2: storage.counters: must be `memory` or a URL"),
        ("upstreams:\n  a: {base_url: 'http://h:x/v1'}", "config.yaml:2: upstreams.a.base_url: is no URL"),
        ("upstreams:\n  a: {base_url: 'http://[::1/v1'}", "config.yaml:2: upstreams.a.base_url: is no URL"),
        ("upstreams:\n  a: {base_url: 'http://h/v1?version=2'}", "config.yaml:2: upstreams.a.base_url: takes no user"),
        (
            'upstreams:\n  a: {base_url: "http://h/v1", api_key: "a\\r\\nx: b"}',
            "config.yaml:2: upstreams.a.api_key: must be one line",
        ),
        (
            "webhooks:\n- {url: 'http://h/a', events: [budget]}\n- {url: 'http://h/a', events: [balance]}",
            "config.yaml:3: webhooks[1].url: the same URL twice",
        ),
        (
            "upstreams: {a: {base_url: 'http://a/v1'}}\nmodels:\n  m:\n    deployments: [{to: a}, {to: a, model: m}]",
            "config.yaml:4: models.m.deployments: the same place and model twice",
        ),
        ("server: {port: 1}\nserver: {port: 2}", "config.yaml:2: server: given twice"),
        ("server:\n\t- x", "config.yaml:2: not valid YAML"),
    ],
)
def test_a_wrong_value_is_refused_on_its_line(tmp_path: Path, text: str, expected: str) -> None:
    lines = refused(tmp_path, text)
    assert len(lines) == 1
    assert lines[0].startswith(expected)


MODEL = """\
backend: {drafts: {a: ngram}}
upstreams: {legacy: {base_url: "https://api.example.com/v1"}}
models:
  m:
    deployments: [{to: DEPLOYMENT}]
    fallback: [FALLBACK]
    drafts: [DRAFT]
    default_draft: DEFAULT
    price: {currency: USD, input: "INPUT", output: "0.42"}
"""
GOOD = {"DEPLOYMENT": "backend", "FALLBACK": "legacy", "DRAFT": "a", "DEFAULT": "a", "INPUT": "0.28"}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"DEPLOYMENT": "nowhere"}, ":5: models.m.deployments[0].to: no upstream is called 'nowhere'; known: backend"),
        ({"FALLBACK": "nowhere"}, ":6: models.m.fallback[0]: no upstream is called 'nowhere'; known: backend, legacy"),
        ({"DRAFT": "b", "DEFAULT": "b"}, ":7: models.m.drafts[0]: the backend has no draft 'b'; backend.drafts has: a"),
        ({"DEFAULT": "b"}, ":8: models.m.default_draft: 'b' is not among the drafts of this model: a"),
        ({"INPUT": "0.0000001"}, ":9: models.m.price.input: 0.0000001 is finer than the ledger keeps"),
        ({"INPUT": "-1"}, ":9: models.m.price.input: a price cannot be negative"),
    ],
)
def test_names_must_exist_and_prices_must_be_exact(tmp_path: Path, wrong: dict[str, str], expected: str) -> None:
    text = MODEL
    for name, value in (GOOD | wrong).items():
        text = text.replace(name, value)
    lines = refused(tmp_path, text)
    assert len(lines) == 1
    assert lines[0].startswith("config.yaml" + expected)


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    lines = refused(tmp_path, "server: {prt: 1}\nstorage: {databse: x}\nfxx: {}\n")
    assert [line.split(": ")[0] for line in lines] == ["config.yaml:1", "config.yaml:2", "config.yaml:3"]


def test_wrong_types_hide_nothing_else_that_is_wrong(tmp_path: Path) -> None:
    text = """\
server:
  workers: many
upstreams:
  near: {base_url: example.com}
  far: {max_concurrency: 0}
models:
  m:
    deployments: [{to: nowhere}, {to: far, weight: none}, {model: x}]
    price: {currency: EUR, input: "-1", output: [1]}
webhooks: [{secret: hush, url: 5}]
"""
    found = [line.removeprefix("config.yaml:").split(": ")[:2] for line in refused(tmp_path, text)]
    assert found == [
        ["2", "server.workers"],
        ["4", "upstreams.near.base_url"],
        ["5", "upstreams.far.max_concurrency"],
        ["5", "upstreams.far"],
        ["8", "models.m.deployments[1].weight"],
        ["8", "models.m.deployments[2]"],
        ["8", "models.m.deployments[0].to"],
        ["9", "models.m.price.currency"],
        ["9", "models.m.price.output"],
        ["9", "models.m.price.input"],
        ["10", "webhooks[0].url"],
    ]


def test_a_missing_admin_token_variable_means_one_is_generated(tmp_path: Path) -> None:
    assert load(tmp_path, "admin_token: env:TALLYGATE_ADMIN_TOKEN").admin_token is None


def test_the_admin_token_comes_from_the_environment_without_a_file(tmp_path: Path) -> None:
    settings = load_settings(None, tmp_path, environ={"TALLYGATE_ADMIN_TOKEN": "from-the-environment"})
    assert settings.admin_token == "from-the-environment"


def test_command_line_values_meet_the_same_checks(tmp_path: Path) -> None:
    settings = load_settings(None, tmp_path, {"server.port": 9, "server.host": None}, environ={})
    assert (settings.server.port, settings.server.host) == (9, "127.0.0.1")
    with pytest.raises(SettingsError, match=r"server\.workers: 3 workers cannot share counters"):
        load_settings(None, tmp_path, {"server.workers": 3}, environ={})


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "gone.yaml", tmp_path)


@pytest.mark.parametrize("text", ["server: " + "[" * 5_000, "server: " + "{a: " * 3_000 + "1" + "}" * 3_000])
def test_what_is_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    assert refused(tmp_path, text) == ["config.yaml: nested too deeply: not a configuration file"]


def test_a_secret_or_configuration_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "endless").write_bytes(b"a" * (4 * 2**20 + 1))
    assert "larger than 4 MiB: not a secret" in refused(tmp_path, "admin_token: file:endless")[0]
    with pytest.raises(SettingsError, match="larger than 4 MiB: not a configuration file"):
        load_settings(tmp_path / "endless", tmp_path)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A FIFO that nobody writes to would be waited for without end."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("fifo")
    for name, why in (("fifo", "no regular file"), ("link", "no regular file"), ("folder", "a directory")):
        with pytest.raises(SettingsError, match=rf"{name}: cannot be read: it is {why}"):
            load_settings(tmp_path / name, tmp_path)
        assert f"cannot read {tmp_path / name}: it is {why}" in refused(tmp_path, f"admin_token: file:{name}")[0]
    for device in ("/dev/zero", "/dev/null", "/dev/tty"):
        with pytest.raises(SettingsError, match=rf"{device}: cannot be read"):
            load_settings(Path(device), tmp_path)


def test_merged_defaults_may_be_overridden(tmp_path: Path) -> None:
    text = """\
upstreams:
  a: &common {base_url: "https://a.example.com/v1", max_concurrency: 4}
  b: {<<: *common, base_url: "https://b.example.com/v1"}
"""
    settings = load(tmp_path, text)
    assert settings.upstreams["b"].base_url == "https://b.example.com/v1"
    assert settings.upstreams["b"].max_concurrency == 4


ROUTED = """\
upstreams: {a: {base_url: "http://a/v1"}, b: {base_url: "http://b/v1"}}
models:
  m:
    deployments: [{to: a}, {to: b, DEPLOYMENT}]
    drafts: [small]
    RAMP
"""


@pytest.mark.parametrize(
    ("deployment", "ramp", "expected"),
    [
        ("draft: large", "", ":4: models.m.deployments[1].draft: 'large' is not among the drafts of this model: small"),
        ("weight: 1", "ramp: {deployment: c}", ":6: models.m.ramp.deployment: no deployment 'c'; this model has: a, b"),
        ("weight: 1", "ramp: {deployment: b, steps: [50, 10]}", ":6: models.m.ramp.steps: must rise"),
        ("weight: 1", "ramp: {deployment: b, steps: [0, 10]}", ":6: models.m.ramp.steps[0]: 0 is out of range"),
        (
            "weight: 1",
            "ramp: {deployment: b, max_error_rate: 2}",
            ":6: models.m.ramp.max_error_rate: 2.0 is out of range",
        ),
        ("weight: 1000001", "", ":4: models.m.deployments[1].weight: 1000001 is out of range"),
        ("weight: 1", "on_hangup: wait", ":6: models.m.on_hangup: 'wait' is not one of: cancel, finish"),
    ],
)
def test_what_a_route_cannot_be_is_refused(tmp_path: Path, deployment: str, ramp: str, expected: str) -> None:
    (line,) = refused(tmp_path, ROUTED.replace("DEPLOYMENT", deployment).replace("RAMP", ramp))
    assert line.startswith("config.yaml" + expected)


@pytest.mark.parametrize("field", ["metrics: metrics", "health_check: {path: health}", "metrics: '/a b'"])
def test_paths_on_a_server_begin_with_a_slash(tmp_path: Path, field: str) -> None:
    (line,) = refused(tmp_path, f"upstreams:\n  a:\n    base_url: http://a/v1\n    {field}\n")
    assert "must be a path that begins with /" in line
