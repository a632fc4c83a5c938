"""`weft chat` against a scripted mesh: whom it asks, what it tells, and its history."""

from pathlib import Path

import pytest
from cli_harness import ScriptedMesh

from weft.api.common.v1 import event_pb2, json_value_pb2, signal_pb2, warning_pb2
from weft.client import connect
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import chat
from weft_app.cli.chat import HISTORY_NAME, Conversation, converse, prompt_history
from weft_app.cli.terminal import shown

CTRL_C = "\x03"

pytest_plugins = ("cli_mesh",)


@pytest.mark.parametrize(
    ("name", "asked", "header"),
    [
        ("qwen", "qwen", "Model: qwen (pool big)\nSource: runner  Status: active"),
        ("big", "big", "Pool: big\nMembers: 2 (2 active)"),
        ("coder", "agent/coder", "Agent: coder → model qwen\nSource: runner  Status: active"),
        ("agent/coder", "agent/coder", "Agent: coder → model qwen"),
    ],
)
def test_models_pools_and_agents_are_addressed_by_name(mesh: ScriptedMesh, name: str, asked: str, header: str) -> None:
    result = mesh.run("chat", name, "-v", "-m", "hi")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"I am {asked}\n"
    assert header in result.stderr
    plain = mesh.run("chat", name, "-m", "hi")
    assert header not in plain.stderr
    assert plain.stderr.splitlines()[-1] == "queue 0 ms, r1 on box, request req-1"


def test_verbose_chat_ends_with_the_full_receipt_and_the_explain_command(mesh: ScriptedMesh) -> None:
    shown = mesh.run("chat", "qwen", "hi", "-v").stderr
    _, receipt = shown.split("queue 0 ms, r1 on box, request req-1\nweft explain req-1\n\nSummary\n")
    facts = dict(line.split(":", 1) for line in receipt.splitlines())
    assert facts["  Attempt 1"].strip() == "r1: answered"
    assert facts.keys() >= {"  Outcome", "  Waited"}


def test_waiting_and_waking_are_reported_on_stderr(mesh: ScriptedMesh) -> None:
    result = mesh.run("chat", "qwen", stdin="hi")
    assert "queued, position 1: every slot is taken" in result.stderr
    assert "loading 50%: waking" in result.stderr
    assert result.stdout == "I am qwen\n"


def test_signals_warnings_and_tools_are_reported_on_stderr(mesh: ScriptedMesh) -> None:
    arguments = json_value_pb2.JsonObject()
    arguments.fields.add(name="path").value.string_value = "ü\x1b[2J" + "x" * 500
    mesh.chat_asides += [
        event_pb2.InferenceEvent(signal=signal_pb2.Signal(name="NEEDS_HIGHER_REASONER")),
        event_pb2.InferenceEvent(warning=warning_pb2.Warning(message="mirostat is not supported")),
        event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(name="files.read", arguments=arguments)),
        event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(content="two\nlines " + "y" * 500)),
        event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(content="no such file", failed=True)),
    ]
    result = mesh.run("chat", "qwen", "-m", "hi")
    assert result.stdout == "I am qwen\n"
    told = [line for line in result.stderr.splitlines() if line.startswith(("signal", "warning", "tool"))]
    assert told[0] == "signal NEEDS_HIGHER_REASONER"
    assert told[1] == "warning: mirostat is not supported"
    assert told[2].startswith('tool files.read {"path": "ü')
    assert told[3].startswith("tool answered: two lines yyy")
    assert told[4] == "tool failed: no such file"
    assert "\x1b" not in result.stderr
    assert all(len(line) < 250 for line in told)


@pytest.mark.parametrize(
    ("flags", "thinking", "allows_remote"),
    [((), None, False), (("--thinking",), True, False), (("--no-thinking", "--allow-remote"), False, True)],
)
def test_thinking_and_remote_models_are_requested_only_by_their_flags(
    mesh: ScriptedMesh, flags: tuple[str, ...], thinking: bool | None, allows_remote: bool
) -> None:
    assert mesh.run("chat", "qwen", "-m", "hi", *flags).exit_code == 0
    asked = mesh.asked[-1]
    assert (asked.payload.thinking if asked.payload.HasField("thinking") else None) is thinking
    assert asked.options.allow_remote is allows_remote


def test_message_can_follow_the_name(mesh: ScriptedMesh) -> None:
    named, bare = mesh.run("chat", "qwen", "-m", "hi"), mesh.run("chat", "qwen", "hi")
    assert bare.exit_code == 0
    assert bare.stdout == named.stdout
    twice = mesh.run("chat", "qwen", "hi", "-m", "hi")
    assert twice.exit_code == 2
    assert "--message: is the same as PROMPT" in twice.stderr


@pytest.mark.parametrize("flags", [("-m", ""), ("-m", " \n"), (), ("",)])
def test_empty_message_is_rejected(mesh: ScriptedMesh, flags: tuple[str, ...]) -> None:
    result = mesh.run("chat", "qwen", *flags, stdin="")
    assert result.exit_code == 2
    assert "the message is empty" in result.stderr
    assert not mesh.asked


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "0"),
        ("--max-tokens", "99999999999999"),
        ("--temperature", "9"),
        ("--temperature", "nan"),
        ("--timeout", "0"),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
    ],
)
def test_out_of_range_number_is_a_usage_error(mesh: ScriptedMesh, option: str, value: str) -> None:
    result = mesh.run("chat", "qwen", "-m", "hi", option, value)
    assert result.exit_code == 2, result.output
    assert not mesh.asked


def test_timeout_error_names_the_option_to_extend_it(mesh: ScriptedMesh) -> None:
    mesh.chat_error = WeftError(Reason.DEADLINE_EXCEEDED, "Deadline Exceeded")
    result = mesh.run("chat", "qwen", "-m", "hi", "--timeout", "7")
    assert result.exit_code == 5
    assert "exceeded the timeout of 7 s; set a longer one with --timeout" in result.stderr


def test_piped_input_need_not_be_valid_utf8(mesh: ScriptedMesh) -> None:
    assert mesh.run("chat", "qwen", stdin=b"what is \xff?").exit_code == 0
    assert mesh.asked[-1].payload.messages[-1].content[0].text == "what is \ufffd?"


def test_long_piped_message_is_rejected_rather_than_cut(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes were read up to the limit, and its characters, which are fewer, compared with it."""
    monkeypatch.setattr(chat, "MAX_PIPED_BYTES", 1024)
    result = mesh.run("chat", "qwen", stdin="ü" * 600)
    assert (result.exit_code, mesh.asked) == (2, [])
    assert mesh.run("chat", "qwen", stdin="ü" * 512).exit_code == 0


def test_answers_are_stripped_of_terminal_escapes() -> None:
    assert shown("\x1b]0;owned\x07\x9b2J one\n\ttwo 👩\u200d🔬\r") == " ]0;owned  2J one\n\ttwo 👩\u200d🔬 "


def _typing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    typed = iter(lines)

    def read(_: str) -> str:
        try:
            line = next(typed)
        except StopIteration:
            raise EOFError from None
        if line == CTRL_C:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)


def test_turns_are_remembered_shown_and_cleared(
    mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _typing(monkeypatch, "one", "two", "/history", "/clear", "three", "/what", "/quit", "never")
    with connect(home=mesh.home) as client:
        converse(Conversation(client, "qwen", [{"role": "system", "content": "Be terse."}], {}, 60.0))
    assert [len(request.payload.messages) for request in mesh.asked] == [2, 4, 2], "system prompt and turns"
    err = capsys.readouterr().err
    assert "system: Be terse.\nuser: one\nassistant: I am qwen\nuser: two\n" in err
    assert err.count("/clear starts") == 2, "an unknown command is answered with those there are"


def test_ctrl_c_at_the_prompt_keeps_the_conversation(mesh: ScriptedMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    _typing(monkeypatch, "one", CTRL_C, "two")
    with connect(home=mesh.home) as client:
        converse(Conversation(client, "qwen", [], {}, 60.0))
    assert [len(request.payload.messages) for request in mesh.asked] == [1, 3]


def test_prompt_history_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    readline = pytest.importorskip("readline")
    (tmp_path / "state").mkdir()
    with prompt_history(tmp_path):
        readline.add_history("hello there")
    file = tmp_path / "state" / HISTORY_NAME
    assert "hello there" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    with prompt_history(tmp_path):
        assert readline.get_history_item(1) == "hello there"


def test_chat_works_if_the_history_cannot_be_saved(tmp_path: Path) -> None:
    with prompt_history(tmp_path / "none"):
        pass
