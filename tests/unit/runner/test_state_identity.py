"""What must be equal for a server to restore the prompts of an earlier one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from runner_svc.runtimes.saved_prompts import state_identity

CONTEXT = "4096"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The identity of a server on PATH with a model in its folder and an adapter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("a-server", "model.gguf", "adapter.gguf"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o700)

    def identity(context: str = CONTEXT, **variables: str) -> str:
        adapter = f"{tmp_path}/adapter.gguf:0"
        arguments = ["a-server", "--model", "model.gguf", "--lora-scaled", adapter, "--ctx-size", context]
        return state_identity(arguments, variables)

    return identity


def test_identity_of_the_same_server_stays(server: Callable[..., str]) -> None:
    assert server(LLAMA_ARG_A="1") == server(LLAMA_ARG_A="1")


@pytest.mark.parametrize("name", ["a-server", "model.gguf", "adapter.gguf"])
def test_identity_differs_once_a_file_was_replaced(server: Callable[..., str], tmp_path: Path, name: str) -> None:
    before = server()
    (tmp_path / name).write_text("another one")
    assert server() != before


def test_identity_depends_on_arguments_and_variables(server: Callable[..., str]) -> None:
    assert len({server(), server("2048"), server(LLAMA_ARG_A="1")}) == 3
