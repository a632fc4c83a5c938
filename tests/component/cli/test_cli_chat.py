"""`weft chat` against a scripted mesh: whom it asks, what it tells, and its history."""

from pathlib import Path

import pytest
from cli_harness import ScriptedMesh

from weft.cli.chat import Conversation, converse
from weft.cli.chat_history import HISTORY_NAME, prompt_history
from weft.client import connect

pytest_plugins = ("cli_mesh",)


@pytest.mark.parametrize(
    ("name", "asked", "header"),
    [
        ("qwen", "qwen", "Model: qwen (pool big)\nKind: virtual Status: active"),
        ("big", "big", "Pool: big\nMembers: 2 (2 active)"),
        ("coder", "agent/coder", "Agent: coder → model qwen\nKind: virtual Status: active"),
        ("agent/coder", "agent/coder", "Agent: coder → model qwen"),
    ],
)
def test_models_pools_and_agents_are_asked_by_their_names(
    mesh: ScriptedMesh, name: str, asked: str, header: str
) -> None:
    result = mesh.run("chat", name, "-m", "hi")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"I am {asked}\n"
    assert header in result.stderr


def test_waiting_and_waking_are_told_beside_the_answer(mesh: ScriptedMesh) -> None:
    result = mesh.run("chat", "qwen", stdin="hi")
    assert "queued, place 1: every slot is taken" in result.stderr
    assert "loading 50%: waking" in result.stderr
    assert result.stdout == "I am qwen\n"


@pytest.mark.parametrize(("name", "code"), [("nobody", 3), ("agent/nobody", 3), ("../x", 2)])
def test_nobody_answers_for_an_unknown_name(mesh: ScriptedMesh, name: str, code: int) -> None:
    result = mesh.run("chat", name, "-m", "hi")
    assert result.exit_code == code
    assert not mesh.asked


def _typing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    typed = iter(lines)

    def read(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_turns_are_remembered_shown_and_forgotten(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _typing(monkeypatch, "one", "two", "/history", "/clear", "three", "/what", "/quit", "never")
    with connect(home=mesh.home) as client:
        converse(Conversation(client, "qwen", [{"role": "system", "content": "Be terse."}], {}, 60.0))
    assert [len(request.payload.messages) for request in mesh.asked] == [2, 4, 2], "system prompt and turns"
    err = capsys.readouterr().err
    assert "system: Be terse.\nuser: one\nassistant: I am qwen\nuser: two\n" in err
    assert err.count("/clear forgets") == 2, "an unknown command is answered with those there are"


def test_what_was_typed_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    (tmp_path / "state").mkdir()
    with prompt_history(tmp_path):
        readline.add_history("hello there")
    file = tmp_path / "state" / HISTORY_NAME
    assert "hello there" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    with prompt_history(tmp_path):
        assert readline.get_history_item(1) == "hello there"


def test_a_home_that_cannot_keep_a_history_is_no_reason_not_to_chat(tmp_path: Path) -> None:
    with prompt_history(tmp_path / "none"):
        pass
