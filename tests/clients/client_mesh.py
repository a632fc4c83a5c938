"""The mesh that clients are tried against: runners whose engines are fakes, each with a script of its own."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from client_run import AGENT_FILE, AGENT_TEST, AGENT_TEXT
from mesh_process import write_config

from weft_testing.fake_backend.process import fake_backend_command

TALK_TEXT = "tok0 tok1 tok2 tok3 tok4 tok5 tok6 tok7"
CONTEXT_TOKENS = 65_536
"""Agents send tens of thousands of tokens before the first word of their user."""

_WEATHER = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
_CUT_ANSWER = (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    'data: {"choices": [{"index": 0, "delta": {"content": "tok0"}, "finish_reason": null}]}\n\n'
    'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}\n\n'
    "data: [DONE]\n\n"
)
_CHANGE = f"sed s/sea/lake/ {AGENT_FILE} > changed && mv changed {AGENT_FILE}"
_TYPED = {"name": "final_result", "arguments": '{"city": "Oslo", "population": 700000}'}


@contextmanager
def media_servers() -> Iterator[dict[str, Any]]:
    """Servers that make images, transcribe and speak; yields the runner to which they are attached."""
    with ExitStack() as stack:
        whole, broken = (stack.enter_context(_media_server(*flags)) for flags in ((), ("--close-after-tokens", "1")))
        models = [
            {"name": "painter", "url": whole, "operations": ["image"]},
            {"name": "ears", "url": whole, "operations": ["transcription"]},
            {"name": "voice", "url": whole, "operations": ["speech"]},
            {"name": "broken-painter", "url": broken, "operations": ["image"]},
        ]
        yield {"name": "media", "runtime": "openai_http", "models": models}


@contextmanager
def _media_server(*flags: str) -> Iterator[str]:
    command = fake_backend_command("--die-with-parent", "--offers", "image,transcription,speech", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(found for line in process.stdout if (found := re.search(r"listening on (http://\S+)", line)))
            yield f"{found[1]}/v1"
        finally:
            process.kill()


def write_client_config(folder: Path, *runners: dict[str, Any], **sections: Any) -> Path:
    """A weft.yaml with the models that `shared/report.py` describes, one for each agent's own tools, and `runners`."""

    models = [
        _model("talk", answer_tokens=8),
        _model("slow", answer_tokens=8, tokens_per_second=2),
        _model("tools", tool_call=_WEATHER, text="It is sunny in Oslo."),
        _model("typed", tool_call=_TYPED, text="Oslo."),
        _model("think", reasoning_text="Six times seven.", text="The answer is 42."),
        _model("broken", answer_tokens=64, close_after_tokens=6),
        _model("cut", raw_answer=_CUT_ANSWER),
        _model("text-only-meant-to-fail", text_only_status=500),
        _model(
            "agent-codex",
            turns=_task(
                ("exec_command", {"cmd": f"cat {AGENT_FILE}"}),
                ("exec_command", {"cmd": _CHANGE}),
                ("exec_command", {"cmd": f"sh {AGENT_TEST}"}),
            ),
        ),
        _model(
            "agent-claude-code",
            turns=_task(
                ("Read", {"file_path": AGENT_FILE}),
                ("Edit", {"file_path": AGENT_FILE, "old_string": "sea", "new_string": "lake"}),
                ("Bash", {"command": f"sh {AGENT_TEST}", "description": "Run the test"}),
            ),
        ),
        _model(
            "agent-qwen-code",
            turns=_task(
                # Its tools for files take absolute paths, and the folder is made later.
                ("run_shell_command", {"command": f"cat {AGENT_FILE}", "is_background": False}),
                ("run_shell_command", {"command": _CHANGE, "is_background": False}),
                ("run_shell_command", {"command": f"sh {AGENT_TEST}", "is_background": False}),
            ),
        ),
        _model(
            "agent-cline",
            turns=_task(
                ("read_files", {"files": [{"path": AGENT_FILE}]}),
                ("editor", {"path": AGENT_FILE, "old_text": "sea", "new_text": "lake"}),
                ("run_commands", {"commands": [f"sh {AGENT_TEST}"]}),
            ),
        ),
        _model(
            "agent-opencode",
            turns=_task(
                ("read", {"filePath": AGENT_FILE}),
                ("edit", {"filePath": AGENT_FILE, "oldString": "sea", "newString": "lake"}),
                ("bash", {"command": f"sh {AGENT_TEST}", "description": "Run the test"}),
            ),
        ),
    ]
    runner = {"name": "fakes", "command": fake_backend_command(), "models": models}
    return write_config(folder, runner, *runners, **sections)


def _task(*steps: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """An agent's model: with the agent's own tools it reads the notes, changes them, and runs their test."""
    calls = [{"calls": [{"name": tool, "arguments": json.dumps(arguments)}]} for tool, arguments in steps]
    return [*calls, {"text": AGENT_TEXT}]


def _model(name: str, **script: Any) -> dict[str, Any]:
    flags = fake_backend_command(**script)[len(fake_backend_command()) :]
    return {
        "name": name,
        "path": __file__,
        "slots": 4,
        "context_tokens": CONTEXT_TOKENS,
        "extra_arguments": flags,
    }
