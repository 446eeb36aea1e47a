"""An admin API over real HTTP, on a database of its own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from ledger.database import Database
from ledger.migrations import migrate
from proxy.admin.app import admin_app
from proxy.settings import Settings, load_settings
from tests.conftest import run_apart

ADMIN_TOKEN = "a-configured-admin-token"


@dataclass
class Admin:
    """A client that is an administrator, and what the server works on."""

    client: httpx.Client
    settings: Settings
    url: str

    def with_token(self, token: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {token}"}, timeout=30)

    def team(self, name: str = "Web shop", **fields: object) -> str:
        answer = self.client.post("/teams", json={"name": name, **fields})
        assert answer.status_code == 201, answer.text
        team_id: str = answer.json()["id"]
        return team_id


@contextlib.contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """The app in a thread of its own, on a free port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server ended while starting")
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database to copy from."""
    path = tmp_path_factory.mktemp("template") / "tallygate.db"
    run_apart(lambda: migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture
def base_dir(tmp_path: Path, migrated_file: Path) -> Path:
    """What `--data-dir` names, with a migrated ledger in it."""
    (tmp_path / "data").mkdir()
    shutil.copy(migrated_file, tmp_path / "data/tallygate.db")
    return tmp_path


@pytest.fixture
def admin(base_dir: Path) -> Iterator[Admin]:
    settings = load_settings(None, base_dir, environ={"TALLYGATE_ADMIN_TOKEN": ADMIN_TOKEN})
    opened: list[Database] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        opened.append(await Database.open(settings.storage.database))
        yield
        await opened[0].close()

    app = Starlette(routes=[Mount("/admin/v1", admin_app(settings, lambda: opened[0]))], lifespan=lifespan)
    with serving(app) as url:
        url += "/admin/v1"
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN_TOKEN}"}, timeout=30) as client:
            yield Admin(client, settings, url)
