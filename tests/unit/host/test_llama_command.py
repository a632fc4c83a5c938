"""Which llama.cpp server is started."""

import sys
from pathlib import Path

import pytest

from runner_svc.runtimes.llama_server.runtime import LAUNCHER, llama_command


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def _install_native(folder: Path) -> Path:
    binary = folder / "llama-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return binary


def test_native_server_on_the_path_is_preferred(search_path: Path) -> None:
    binary = _install_native(search_path)
    assert llama_command(None) == (str(binary),)


def test_configured_server_takes_precedence_over_both(search_path: Path) -> None:
    _install_native(search_path)
    assert llama_command(("/opt/llama-server", "--flash-attn")) == ("/opt/llama-server", "--flash-attn")


def test_wheel_server_is_used_without_a_native_one(search_path: Path) -> None:
    assert not list(search_path.iterdir())
    assert llama_command(None) == (sys.executable, "-m", LAUNCHER)
