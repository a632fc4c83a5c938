"""A configuration section becomes a model on llama-cpp-python, or is refused by the name of its field."""

from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.presence import present

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.runtimes.llama_server.arguments import server_arguments
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation, Skill
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend

WHERE = "runners.r.models.m"


def _served(runtime: str, **model: Any) -> ServedModel:
    document = {"name": "r", "runtime": runtime, "command": ["server"], "models": [{"name": "m", **model}]}
    section = parse_section(ConfiguredRunner, document)
    return served_model(section, section.models[0], 1.0)


def test_llama_cpp_python_model_has_one_slot_and_declares_its_operations() -> None:
    served = _served("llama_cpp_python", path="model.gguf", embeddings=False)
    assert served.slots == 1
    assert served.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    assert isinstance(served.make_backend(), LlamaCppPythonBackend)
    assert _served("llama_cpp_python", path="model.gguf", slots=1).operations == TEXT_OPERATIONS | {Operation.TOKENIZE}


def test_more_than_one_slot_is_refused_on_llama_cpp_python() -> None:
    with fails(field=f"{WHERE}.slots"):
        _served("llama_cpp_python", path="model.gguf", slots=2)


def test_template_for_a_running_server_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("x")
    with pytest.raises(FieldError, match=r"models.0.chat_template_path: .*set the template there"):
        _served("openai_http", url="http://127.0.0.1:1/v1", chat_template_path=str(template))


def test_template_is_a_llama_server_flag() -> None:
    config, _ = engine_settings(
        LlamaServerModel, command=("llama-server",), path=Path("m.gguf"), name="m", chat_template_path=Path("t.jinja")
    )
    arguments = server_arguments(config)
    assert arguments[arguments.index("--chat-template-file") + 1] == "t.jinja"
    without, _ = engine_settings(LlamaServerModel, command=("llama-server",), path=Path("m.gguf"), name="m")
    assert "--chat-template-file" not in server_arguments(without)


async def test_ctranslate2_model_is_a_text_only_folder_without_a_device_on_cpu(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x" * 1_000_000)
    served = _served("ctranslate2", path=str(tmp_path), device="cpu")
    assert served.model_path == tmp_path / "model.bin"
    assert served.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    assert Skill.IMAGE in served.capabilities.lacking
    on_processor = await served.forecast.expect(AS_CONFIGURED)
    on_device = await _served("ctranslate2", path=str(tmp_path), device="cuda").forecast.expect(AS_CONFIGURED)
    assert on_processor is not None
    assert on_device is not None
    assert on_processor.bytes == 0
    assert on_device.bytes >= 1_000_000
    with pytest.raises(FieldError, match="CTranslate2 has no embeddings"):
        _served("ctranslate2", path=str(tmp_path), embeddings=True)
    lack = present(_served("ctranslate2", path=str(tmp_path), quantizations={"float16": str(tmp_path / "other")}).lack)
    assert f"there is no file {tmp_path}/other/model.bin" in lack.message
