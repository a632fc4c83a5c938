"""The session file, intact and damaged, and the identity of a server whose state is stored."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runner_svc.runtimes.saved_prompts import state_identity
from runner_svc.session import session_file as session_module
from runner_svc.session.session_file import SessionFile


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(64) + b"\xff\n")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _endless(path: Path) -> None:
    path.write_bytes(b"s" * 100_000)


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("damage", [_garbage, _empty, _endless, _folder, _loop])
def test_damaged_session_file_is_set_aside_and_a_new_session_starts(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.session"
    damage(path)
    file = SessionFile(path)
    with capture_logs() as logs:
        assert file.read() == ""
    assert [(line["log_level"], line["file"]) for line in logs] == [("warning", str(path))]
    assert os.path.lexists(tmp_path / "a.session.bad")
    file.keep("ses-1")
    assert SessionFile(path).read() == "ses-1"


def test_missing_session_file_is_not_logged() -> None:
    with capture_logs() as logs:
        assert SessionFile(Path("/nowhere/at/all")).read() == ""
    assert logs == []


def test_unwritable_session_id_is_logged_without_other_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        del content
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(session_module, "replace_file", full)
    file = SessionFile(tmp_path / "a.session")
    with capture_logs() as logs:
        file.keep("ses-1")
    assert [(line["log_level"], line["why"]) for line in logs] == [("error", "No space left on device")]
    monkeypatch.undo()
    file.keep("ses-1")
    assert file.read() == "ses-1", "it is tried again with the next session"


def test_unchanged_session_id_is_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.session"
    path.write_text("ses-1\n")
    file = SessionFile(path)
    assert file.read() == "ses-1"
    monkeypatch.delattr(session_module, "replace_file")
    file.keep("ses-1")


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
