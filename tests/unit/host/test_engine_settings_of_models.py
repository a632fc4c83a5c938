"""A model's own environment, libraries, projector and draft model reach its engine."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.llama_server.arguments import server_arguments
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.model_engine import LIBRARY_PATH
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft_app.compose.demo import demo_model_path
from weft_app.compose.served_models import runner_context, served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

RUNNERS_OWN = {"PATH": "/bin", "HF_TOKEN": "hf-secret", LIBRARY_PATH: "/usr/lib/cuda"}


def section(path: Path, runtime: str = "llama_server", **fields: Any) -> RunnerSettings:
    model = {"name": "m", "path": str(path), **fields}
    return parse_section(ConfiguredRunner, {"name": "r", "runtime": runtime, "command": ["server"], "models": [model]})


def served(runner: RunnerSettings, environment: Mapping[str, str] = RUNNERS_OWN) -> ServedModel:
    context = runner_context(runner)
    object.__setattr__(context, "environment", environment)
    return served_model(runner, runner.models[0], 5.0, context)


def environment_of(runner: RunnerSettings) -> Mapping[str, str]:
    backend: Any = served(runner).make_backend()
    environment: Mapping[str, str] = backend.context.environment
    return environment


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(MEBIBYTE))
    return path


@pytest.mark.parametrize("runtime", ["llama_server", "llama_cpp_python"])
def test_model_variables_are_added_to_the_listed_ones_of_the_runner(runtime: str, file: Path) -> None:
    slots = {"slots": 1} if runtime == "llama_cpp_python" else {}
    environment = {"GGML_CUDA_GRAPHS": "1", "TOKEN": "bearer ${HF_TOKEN}"}
    found = environment_of(section(file, runtime, environment=environment, **slots))
    listed = {"PATH": "/bin", LIBRARY_PATH: "/usr/lib/cuda"}
    assert found == {**listed, "GGML_CUDA_GRAPHS": "1", "TOKEN": "bearer hf-secret"}
    assert environment_of(section(file, runtime, **slots)) == listed


def test_library_folders_are_searched_before_the_default_ones(file: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    runner = section(file, library_path=[str(folder) for folder in folders])
    assert environment_of(runner)[LIBRARY_PATH] == os.pathsep.join([*map(str, folders), "/usr/lib/cuda"])
    alone: Any = served(runner, {}).make_backend()
    assert alone.context.environment == {LIBRARY_PATH: os.pathsep.join(map(str, folders))}


def test_variable_missing_on_the_runner_is_reported_without_values(file: Path) -> None:
    runner = section(file, environment={"KEY": "prefix-${MISSING}"})
    lack = served(runner).lack
    assert lack is not None
    assert lack.message == "runners.r.models.m.environment: the variable MISSING is not set where the runner runs"


def test_missing_library_folder_is_reported(file: Path, tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="nowhere") as refused:
        served(section(file, library_path=[str(tmp_path), str(tmp_path / "nowhere")]))
    assert refused.value.field == "runners.r.models.m.library_path[1]"


@pytest.mark.parametrize(
    "environment",
    [{"A=B": "1"}, {"": "1"}, {"1A": "1"}, {"A": "x" * 4097}, {"A": "\0"}, {f"A{index}": "1" for index in range(65)}],
)
def test_invalid_variable_names_are_refused(environment: dict[str, str], file: Path) -> None:
    with pytest.raises(FieldError, match="environment"):
        section(file, environment=environment)


def test_variable_values_are_not_shown(file: Path) -> None:
    assert "hunter2" not in repr(section(file, environment={"KEY": "hunter2"}))


def test_attached_server_has_no_environment() -> None:
    model = {"name": "m", "url": "http://127.0.0.1:1/v1", "environment": {"A": "1"}}
    with pytest.raises(FieldError, match="environment"):
        parse_section(ConfiguredRunner, {"name": "r", "runtime": "openai_http", "models": [model]})


def test_projector_and_draft_model_are_server_flags(file: Path) -> None:
    runner = section(file, mmproj_path=str(file), draft_model_path=str(file))
    backend = served(runner).make_backend()
    assert isinstance(backend, LlamaServerBackend)
    arguments = server_arguments(backend.model)
    assert arguments[arguments.index("--mmproj") + 1] == str(file)
    assert arguments[arguments.index("--model-draft") + 1] == str(file)
    assert arguments[arguments.index("--spec-type") + 1] == "draft-simple"


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ("mmproj_path", ["--mmproj", "other.gguf"]),
        ("mmproj_path", ["-mm", "other.gguf"]),
        ("mmproj_path", ["--mmproj-url=http://x"]),
        ("draft_model_path", ["--model-draft", "other.gguf"]),
        ("draft_model_path", ["-md=other.gguf"]),
        ("draft_model_path", ["--spec-draft-model", "other.gguf"]),
    ],
)
def test_companion_file_in_both_setting_and_flags_is_refused(setting: str, flags: list[str], file: Path) -> None:
    with pytest.raises(FieldError, match="in extra_arguments") as refused:
        served(section(file, extra_arguments=flags, **{setting: str(file)}))
    assert refused.value.field == f"runners.r.models.m.{setting}"


@pytest.mark.parametrize("setting", ["path", "mmproj_path", "draft_model_path", "chat_template_path"])
async def test_missing_file_fails_the_loads_of_its_model_until_it_exists(
    setting: str, file: Path, tmp_path: Path
) -> None:
    """It ended the runner, or the whole mesh, with all other models."""
    missing = tmp_path / "missing.gguf"
    settings = {"path": file, setting: missing}
    model = served(section(settings.pop("path"), **{name: str(path) for name, path in settings.items()}))
    assert model.fetch is not None
    with pytest.raises(WeftError, match=f"runners.r.models.m.{setting}: there is no file {missing}$"):
        await model.fetch(lambda _, __: None)
    shutil.copy(file, missing)
    loaded = await model.fetch(lambda _, __: None)
    assert (loaded.lack, loaded.fetch) == (None, None)


def test_configured_speculation_type_is_kept(file: Path) -> None:
    runner = section(file, draft_model_path=str(file), extra_arguments=["--spec-type", "draft-mtp"])
    backend: Any = served(runner).make_backend()
    assert server_arguments(backend.model).count("--spec-type") == 1


async def test_projector_and_draft_model_count_towards_load_memory(tmp_path: Path) -> None:
    projector = tmp_path / "mmproj.gguf"
    projector.write_bytes(bytes(40 * MEBIBYTE))
    model = demo_model_path()
    alone = await served(section(model)).forecast.expect(AS_CONFIGURED)
    both = section(model, mmproj_path=str(projector), draft_model_path=str(model))
    beside = await served(both).forecast.expect(AS_CONFIGURED)
    assert alone is not None
    assert beside is not None
    assert {part.name: part.bytes for part in beside.parts}["projector"] == 40 * MEBIBYTE
    assert beside.bytes == 2 * alone.bytes + 40 * MEBIBYTE, "a draft of the same size takes as much as the model"
