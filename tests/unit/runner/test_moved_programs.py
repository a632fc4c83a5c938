"""A runner's `command` may name a module of weft as it was called before it moved."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runner_svc.runtimes.llama_cpp_python.backend import LlamaCppPythonBackend
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

PYTHON = "/usr/bin/python3"
MOVED = [
    ("llama_server", "runner_svc.backends.xllamacpp_server", "runner_svc.runtimes.llama_server.xllamacpp_launcher"),
    ("llama_server", "weft.testing.fake_backend", "weft_testing.fake_backend"),
    ("llama_cpp_python", "runner_svc.engines.llama_cpp_host", "runner_svc.runtimes.llama_cpp_python.server"),
]


def _command(runtime: str, *command: str) -> tuple[str, ...]:
    model: dict[str, Any] = {"name": "m", "path": str(Path("m.gguf"))}
    if runtime == "llama_cpp_python":
        model["slots"] = 1
    document = {"name": "r", "runtime": runtime, "command": list(command), "models": [model]}
    section = parse_section(ConfiguredRunner, document)
    backend = served_model(section, section.models[0], 1.0).make_backend()
    assert isinstance(backend, LlamaServerBackend | LlamaCppPythonBackend)
    started = backend.context.command
    assert started is not None
    return started


@pytest.mark.parametrize(("runtime", "old", "new"), MOVED)
def test_a_command_with_the_old_name_of_a_module_starts_the_module_of_today(runtime: str, old: str, new: str) -> None:
    assert _command(runtime, PYTHON, "-m", old, "--verbose") == (PYTHON, "-m", new, "--verbose")
    assert find_spec(new) is not None


@pytest.mark.parametrize(("runtime", "old", "new"), MOVED)
def test_a_command_is_otherwise_started_as_it_is_written(runtime: str, old: str, new: str) -> None:
    for command in ((PYTHON, "-m", new), (PYTHON, "-m", f"{old}.more"), (f"/opt/{old}",), ("llama-server",)):
        assert _command(runtime, *command) == command
