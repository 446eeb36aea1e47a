"""Promises about what is made on disk before anything starts."""

from __future__ import annotations

from pathlib import Path

from proxy.preflight import check_directories
from proxy.settings import load_settings


def test_what_the_ledger_keeps_is_for_its_own_user_alone(tmp_path: Path) -> None:
    check_directories(load_settings(None, tmp_path, environ={}))
    for made in ("data", "data/journal"):
        assert (tmp_path / made).stat().st_mode & 0o077 == 0
