"""Hosts of one installation: each a `tallygate serve` of its own with its own data and journals, on one PostgreSQL, one
Valkey and one provider."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.services import Served, free_port, http_ok, wait_until

ADMIN_TOKEN = "t" * 32
PRICE = {"currency": "USD", "input": "0.28", "output": "0.42"}


class Host(Served):
    """`tallygate serve` with its own folder. `changes` go into its configuration, section by section. It listens on
    `address`; `within` is put before its command line."""

    def __init__(
        self,
        folder: Path,
        database: str,
        counters: str,
        upstream: str,
        *,
        address: str = "127.0.0.1",
        within: tuple[str, ...] = (),
        **changes: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.address = address
        self.port = free_port()
        self.url = f"http://{address}:{self.port}"
        secret = "the-secret-of-all-hosts"
        self.config: dict[str, Any] = {
            "server": {"host": address, "port": self.port, "workers": 2, "key_secret": secret},
            "storage": {"database": database, "counters": counters},
            "admin_token": ADMIN_TOKEN,
            "upstreams": {name: {"base_url": upstream, "max_concurrency": 1_024} for name in ("legacy", "other")},
            "models": {"m": {"deployments": [{"to": "legacy"}, {"to": "other", "weight": 0}], "price": PRICE}},
        }
        for section, values in changes.items():
            self.config[section] = {**self.config.get(section, {}), **values}
        self.write_config()
        command = [*within, sys.executable, "-P", "-m", "proxy.cli", "serve", *self.options]
        environ = {"TALLYGATE_ADMIN_TOKEN": "", "TALLYGATE_CONFIG": ""}
        super().__init__(command, ready=self._complete, env=environ, cwd=folder, ready_within_s=150)

    @property
    def options(self) -> list[str]:
        return ["--config", str(self.folder / "tallygate.yaml"), "--data-dir", str(self.folder)]

    def write_config(self) -> None:
        (self.folder / "tallygate.yaml").write_text(yaml.safe_dump(self.config))

    def _complete(self) -> bool:
        return "Ctrl-C stops it" in self.output()

    def admin(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {ADMIN_TOKEN}"}
        return httpx.Client(base_url=f"{self.url}/admin/v1", headers=headers, timeout=30)

    def roles(self, role: str) -> list[psutil.Process]:
        """Its children that run `tallygate ROLE`, by age."""
        found = []
        for process in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if "proxy.cli" in words and words[words.index("proxy.cli") + 1] == role:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def readiness(self) -> dict[str, Any]:
        """What /health/ready says; {} when nobody answers."""
        with contextlib.suppress(httpx.HTTPError, json.JSONDecodeError):
            answer: dict[str, Any] = httpx.get(f"{self.url}/health/ready", timeout=10).json()
            return answer
        return {}

    def ready(self) -> bool:
        return http_ok(f"{self.url}/health/ready")

    def roll(self, timeout_s: float = 120) -> None:
        """Replace its workers one by one; returns when the last one is replaced."""
        workers = self.config["server"]["workers"]
        done = f"({workers} of {workers})"
        before = self.output().count(done)
        os.kill(self.pid, signal.SIGHUP)
        wait_until(lambda: self.output().count(done) > before, timeout_s, f"the roll\n{self.logs()}")

    def logs(self) -> str:
        tails = [
            f"== {path.name}\n{path.read_text(errors='replace')[-2_000:]}"
            for path in sorted((self.folder / "data/logs").glob("*.log"))
        ]
        return "\n".join([self.output()[-2_000:], *tails])


class Fleet:
    """Some hosts, and what a test asks of them together."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts

    @property
    def ports(self) -> list[int]:
        return [host.port for host in self.hosts]

    def new_key(self, *quotas: dict[str, Any], money: str = "1000", **options: Any) -> str:
        """A key of a new team with so many dollars and these quotas of its own."""
        with self.hosts[0].admin() as admin:
            team = _made(admin.post("/teams", json={"name": f"team {uuid.uuid4()}", **options}))["id"]
            topup = {"amount": money, "currency": options.get("billing_currency", "USD"), "reference": team}
            _made(admin.post(f"/teams/{team}/topups", json=topup))
            made = _made(admin.post("/keys", json={"team_id": team}))
            if quotas:
                assert admin.put(f"/keys/{made['id']}/quotas", json=list(quotas)).status_code == 200
        key: str = made["key"]
        return key

    def key_id(self, key: str) -> str:
        with self.hosts[0].admin() as admin:
            found = admin.get("/keys", params={"limit": 1000}).json()["data"]
        ids: list[str] = [item["id"] for item in found if key.startswith(item["prefix"])]
        assert len(ids) == 1
        return ids[0]

    def verify(self, host: Host) -> dict[str, Any]:
        """`tallygate verify` on that host, once all of its journal is posted."""
        import subprocess

        command = [sys.executable, "-P", "-m", "proxy.cli", "verify", "--json", *host.options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ran.stdout, ran.stderr
        proof: dict[str, Any] = json.loads(ran.stdout)
        return proof


def _made(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code in (200, 201), answer.text
    made: dict[str, Any] = answer.json()
    return made


@contextmanager
def fleet_of(folder: Path, count: int, database: str, counters: str, upstream: str, **changes: Any) -> Iterator[Fleet]:
    """Start so many hosts at once; one of them makes the tables."""
    with ExitStack() as stack:
        hosts = [Host(folder / f"host-{n}", database, counters, upstream, **changes) for n in range(count)]
        for host in hosts:
            stack.callback(host.close)
            host.start(wait=False)
        for host in hosts:
            host.wait_ready()
        yield Fleet(hosts)


def metric(host: Host, name: str, *labels: str) -> float:
    """The sum of a family's samples with these labels (`role="gateway"`), of whichever worker takes the connection.
    Raises OSError."""
    with urllib.request.urlopen(f"{host.url}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for at, value in samples if all(label in at for label in labels))
