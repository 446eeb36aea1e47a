"""Promises about docker/: its files fit each other and what the code does. No Docker is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import uvicorn

from proxy.supervisor import STOPPING_S
from tests.deploy.material import (
    DOCKER,
    GATEWAYS,
    JOURNALS,
    ROOT,
    argument,
    check_backend,
    compose,
    containers,
    dockerfile,
    documents,
    environment,
    last_stage,
    manifests,
    nginx,
    pods,
    seconds,
    secrets,
    settings_of,
    the,
    the_object,
)

# Volumes


def test_each_gateway_host_of_compose_has_a_persistent_journal_of_its_own(tmp_path: Path) -> None:
    stage = last_stage(dockerfile(DOCKER / "Dockerfile"))
    base = Path(environment(stage)["TALLYGATE_DATA_DIR"])
    journal = load_journal_dir(base, tmp_path)
    assert journal.is_relative_to(JOURNALS)
    assert the("VOLUME", stage).text == JOURNALS
    volumes = []
    for name in GATEWAYS:
        mounted = dict(reversed(mount.split(":")[:2]) for mount in compose()["services"][name]["volumes"])
        volumes.append(mounted[JOURNALS])
        assert mounted[environment(stage)["TALLYGATE_CONFIG"]] == "./tallygate.yaml"
    assert len(set(volumes)) == len(GATEWAYS), "one journal is one host's"
    assert set(volumes) <= set(compose()["volumes"]), "a named volume outlives its container"


def load_journal_dir(base: Path, tmp_path: Path) -> Path:
    settings = settings_of(DOCKER / "tallygate.yaml", tmp_path)
    return base / settings.storage.journal_path.relative_to(tmp_path)


def test_a_gateway_pod_keeps_its_journal_and_shares_it_with_its_poster_alone() -> None:
    gateway = the_object("StatefulSet", "gateway")
    claim = gateway["spec"]["volumeClaimTemplates"][0]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"], "one writer"
    assert set(gateway["spec"]["persistentVolumeClaimRetentionPolicy"].values()) == {"Retain"}
    pod = gateway["spec"]["template"]["spec"]
    for container in containers(pod):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts[claim["metadata"]["name"]] == JOURNALS
    poster = pod["initContainers"][0]
    assert poster["args"] == ["poster"]
    assert poster["restartPolicy"] == "Always", "a sidecar stops after the gateway and posts its last settlement"


@pytest.mark.parametrize("service", ["postgres", "valkey"])
def test_what_must_survive_a_restart_is_on_a_volume(service: str) -> None:
    definition = compose()["services"][service]
    assert {mount.split(":")[0] for mount in definition["volumes"]} <= set(compose()["volumes"])


# Users


def test_no_container_runs_as_root() -> None:
    for name, service in compose()["services"].items():
        user = service.get("user", "")
        if "build" in service:
            user = the("USER", last_stage(dockerfile(ROOT / service["build"]["dockerfile"]))).text
        assert int(user.split(":")[0]) > 0, name
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert all(item["securityContext"]["allowPrivilegeEscalation"] is False for item in containers(pod)), name
    image_user = int(the("USER", last_stage(dockerfile(DOCKER / "Dockerfile"))).text.split(":")[0])
    assert dict(pods())["gateway"]["securityContext"]["runAsUser"] == image_user, "the volume has one owner everywhere"


# Ports


def test_ports_agree_from_the_balancer_to_the_engine(tmp_path: Path) -> None:
    settings = settings_of(DOCKER / "tallygate.yaml", tmp_path)
    exposed = the("EXPOSE", last_stage(dockerfile(DOCKER / "Dockerfile"))).text
    assert str(settings.server.port) == exposed
    services = compose()["services"]
    proxied = {
        block.words[0] for block in nginx(DOCKER / "nginx.conf").find("upstream") for block in block.find("server")
    }
    assert proxied == {f"{name}:{exposed}" for name in GATEWAYS}
    listened = {block.words[0] for block in nginx(DOCKER / "nginx.conf").find("listen")}
    assert {port.split(":")[-1] for port in services["balancer"]["ports"]} == listened
    assert listened & set(re.findall(r"127\.0\.0\.1:(\d+)", " ".join(services["balancer"]["healthcheck"]["test"])))
    secret = secrets(tmp_path / "secrets") / "database-url"
    assert secret.read_text().endswith(f"@postgres:{services['postgres']['expose'][0]}/tallygate")
    assert settings.storage.counters == f"redis://valkey:{services['valkey']['expose'][0]}/0"


def test_ports_agree_between_pods_services_and_policies() -> None:
    services = {item["metadata"]["name"]: item for item in manifests() if item["kind"] == "Service"}
    workloads = [item for item in manifests() if item["kind"] in ("StatefulSet", "Deployment")]
    for service in services.values():
        wanted = service["spec"]["selector"].items()
        pod = next(
            w["spec"]["template"] for w in workloads if wanted <= w["spec"]["template"]["metadata"]["labels"].items()
        )
        named = {
            port["name"]: port["containerPort"] for item in containers(pod["spec"]) for port in item.get("ports", [])
        }
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named
            assert port["port"] in (80, named[port["targetPort"]])
    for workload in workloads:
        template = workload["spec"]["template"]
        numbers = {
            str(port["containerPort"]) for item in containers(template["spec"]) for port in item.get("ports", [])
        }
        scraped = template["metadata"].get("annotations", {}).get("prometheus.io/port")
        assert scraped is None or scraped in numbers
        for item in containers(template["spec"]):
            port = argument([*item.get("command", []), *item.get("args", [])], "--port")
            assert port is None or port in numbers
        assert workload["spec"].get("serviceName", "gateways") in services
    for policy in (item for item in manifests() if item["kind"] == "NetworkPolicy"):
        service = services[policy["metadata"]["name"]]
        assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]
        assert [port["port"] for port in policy["spec"]["ingress"][0]["ports"]] == [service["spec"]["ports"][0]["port"]]
    route = the_object("HTTPRoute", "tallygate")
    backend = route["spec"]["rules"][0]["backendRefs"][0]
    assert backend["port"] in [port["port"] for port in services[backend["name"]]["spec"]["ports"]]


def test_the_engines_of_others_are_where_the_configuration_says(tmp_path: Path) -> None:
    settings = settings_of(DOCKER / "engines" / "tallygate.yaml", tmp_path)
    services = {
        item["metadata"]["name"]: item["spec"]["ports"][0]["port"] for item in manifests() if item["kind"] == "Service"
    }
    by_name = dict(pods())
    for name, upstream in settings.upstreams.items():
        assert upstream.base_url == f"http://{name}:{services[name]}/v1"
        container = containers(by_name[name])[0]
        words = [*container["command"], *container["args"]]
        served = argument(words, "--served-model-name")
        routed = {
            deployment.model or model
            for model, route in settings.models.items()
            for deployment in route.deployments
            if deployment.to == name
        }
        assert routed == {served}
        limit = argument(words, "--max-num-seqs") or argument(words, "--max-running-requests")
        assert str(upstream.max_concurrency) == limit
        context = argument(words, "--max-model-len") or argument(words, "--context-length")
        assert {str(model.context_tokens) for model in settings.models.values()} == {context}
        secret = next(item["valueFrom"]["secretKeyRef"] for item in container["env"] if "valueFrom" in item)
        assert secret == {"name": "engine-api-key", "key": "key"}


# Behaviour that the code fixes


def test_the_balancer_streams_waits_and_never_generates_twice(tmp_path: Path) -> None:
    conf = nginx(DOCKER / "nginx.conf")
    settings = settings_of(DOCKER / "tallygate.yaml", tmp_path)
    assert conf.value("proxy_buffering") == "off"
    assert conf.value("proxy_ignore_client_abort") == "off"
    assert conf.value("proxy_http_version") == "1.1"
    assert "non_idempotent" not in next(conf.find("proxy_next_upstream")).words
    patience = max([120.0, *(upstream.read_timeout_s for upstream in settings.upstreams.values())])
    assert seconds(conf.value("proxy_read_timeout")) > 2 * patience
    megabytes = int(conf.value("client_max_body_size").removesuffix("m"))
    assert megabytes > settings.server.max_body_mb
    upstream = next(conf.find("upstream"))
    assert seconds(upstream.value("keepalive_timeout")) < uvicorn.Config("x").timeout_keep_alive


def test_the_public_side_of_the_balancer_hides_administration() -> None:
    public = next(
        block
        for block in nginx(DOCKER / "nginx.conf").find("server")
        if not block.words and block.value("listen") == "8080"
    )
    hidden = next(block.words[1] for block in public.find("location") if block.words[0] == "~")
    for path in ("/admin/v1/teams", "/metrics", "/health/ready"):
        assert re.search(hidden, path)
    for path in ("/v1/chat/completions", "/chat/completions", "/v1/models/metrics"):
        assert not re.search(hidden, path)
    routed = the_object("HTTPRoute", "tallygate")["spec"]["rules"][0]["matches"]
    assert [match["path"]["value"] for match in routed] == ["/v1"]


def test_everything_gets_the_time_it_needs_to_stop() -> None:
    draining = documents(DOCKER / "tallygate.yaml")[0]["server"]["drain_s"] + STOPPING_S
    for name in GATEWAYS:
        assert seconds(compose()["services"][name]["stop_grace_period"]) > draining
        assert "backend" in compose()["services"][name]["depends_on"], "else it stops with them, under their streams"
    pod = dict(pods())["gateway"]
    gateway = pod["containers"][0]
    pause = int(gateway["lifecycle"]["preStop"]["exec"]["command"][1])
    draining = documents(DOCKER / "kubernetes" / "tallygate.yaml")[0]["server"]["drain_s"] + STOPPING_S
    assert pod["terminationGracePeriodSeconds"] > pause + draining + 10, "the poster stops after it"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert gateway["livenessProbe"]["httpGet"]["path"] == "/health/live", (
        "a database that is away is no reason to restart"
    )


def test_gateways_are_spread_over_nodes_and_taken_one_at_a_time() -> None:
    spread = dict(pods())["gateway"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    budget = the_object("PodDisruptionBudget", "gateway")
    assert budget["spec"]["maxUnavailable"] == 1
    gateway = the_object("StatefulSet", "gateway")
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    for selector in (spread["labelSelector"], budget["spec"]["selector"], gateway["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()


def test_the_engine_pod_asks_for_a_gpu() -> None:
    engine = containers(dict(pods())["backend"])[0]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert check_backend(engine["args"]).device == "cuda"
    arguments = {
        item.text.partition("=")[0]: item.text.partition("=")[2]
        for item in dockerfile(DOCKER / "Dockerfile.backend")
        if item.name == "ARG"
    }
    assert "/cu" in arguments["TORCH_INDEX_URL"]
    assert set(compose()["services"]["backend"]["build"]["args"]) == set(arguments)
    gpu = documents(DOCKER / "compose.gpu.yaml")[0]["services"]["backend"]
    assert gpu["build"]["args"]["TORCH_INDEX_URL"] == arguments["TORCH_INDEX_URL"]
