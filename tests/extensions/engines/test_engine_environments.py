"""A server program under the interpreter of an engine's own environment, which has the engine's library alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.engine_settings import engine_settings
from kit.tiny_gguf import write_gguf

from runner_svc.backend.port import CallInfo
from weft.api.common.v1 import completion_pb2
from weft_extensions.engines.library_server import BOOTSTRAP
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel

SERVER_PROGRAM = "weft_extensions.engines.llama_cpp_python.server"

LIBRARY = Path(__file__).with_name("scripted_library")
LOOKED_FOR = {
    "runner_svc.policy.parameters": "found",
    # weft's own packages, and what it depends on: their versions must not rule in the engine's environment.
    "weft": "missing",
    "msgspec": "missing",
    "gateway": "missing",
    "grpc": "missing",
    "google": "missing",
    "pydantic": "missing",
    # modules beside the script, which Python would put first
    "messages": "missing",
    "engine": "missing",
}


@pytest.mark.slow("starts a server program")
async def test_library_program_runs_isolated_from_wefts_environment(tmp_path: Path) -> None:
    backend = LlamaCppPythonBackend(
        *engine_settings(
            LlamaCppPythonModel,
            path=write_gguf(tmp_path / "tiny.gguf"),
            # Without the packages of the interpreter that runs the tests.
            command=(sys.executable, "-S", str(BOOTSTRAP), SERVER_PROGRAM),
            environment={
                **os.environ,
                "PYTHONPATH": str(LIBRARY),
                "SCRIPTED_LLAMA": json.dumps({"look_for": list(LOOKED_FOR)}),
            },
        )
    )
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="hi")])
    await backend.start()
    try:
        call = CallInfo(request_id="r1", traceparent="")
        events = [event async for frame in backend.generate(payload, call) for event in frame]
    finally:
        await backend.stop()
    assert "".join(event.delta.text for event in events) == "The sea is calm and blue today."
    found = dict(line.split(": ") for line in backend.log_lines(100) if ": " in line)
    assert {name: found.get(name) for name in LOOKED_FOR} == LOOKED_FOR


@pytest.mark.parametrize("arguments", [(), ("weft_app.cli.main",), ("json",)])
def test_bootstrap_starts_only_runner_programs(arguments: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, str(BOOTSTRAP), *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("usage: ")
