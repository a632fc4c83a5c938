"""A runner refuses what its model does not take before it takes a slot, and learns at each load what that is."""

import sys
from pathlib import Path
from typing import Any

import pytest
from kit.fake_backend import run_fake_backend
from kit.tiny_gguf import write_gguf
from runner_harness import events_of, ready_runner, refusal, running_runner

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors.reasons import Reason
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_testing.fake_backend.dialect import Dialect
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.media_files import png

IMAGE = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=png(2, 2), media_type="image/png"))
SEEING = [chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[IMAGE])]
TOOL = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="look"))


def attached(url: str, **fields: Any) -> ServedModel:
    model = {"name": "m", "url": f"{url}/v1", "slots": 1, **fields}
    section = parse_section(ConfiguredRunner, {"name": "r1", "runtime": "openai_http", "models": [model]})
    return served_model(section, section.models[0], 1.0)


def supervised(path: Path, *flags: str, **fields: Any) -> ServedModel:
    model = {"name": "m", "path": str(path), "extra_arguments": list(flags), **fields}
    section = parse_section(ConfiguredRunner, {"name": "r1", "command": fake_backend_command(), "models": [model]})
    return served_model(section, section.models[0], 1.0)


async def test_image_for_a_text_model_is_rejected_while_its_only_slot_is_busy(tmp_path: Path) -> None:
    """Nothing of the refusal depends on a slot, so it is no `no_slot_available`."""
    async with (
        run_fake_backend(answer_tokens=0, tokens_per_second=20) as fake,
        ready_runner(tmp_path, [attached(fake.base_url, skills=["text", "tools"])]) as runner,
    ):
        busy = runner.generate(max_tokens=10_000)
        await busy.read()
        refused = await refusal(runner.generate(messages=SEEING).read())
        assert (refused.reason, refused.message) == (Reason.MODALITY_UNSUPPORTED, "m does not support images")
        full = await refusal(runner.generate(tools=[TOOL]).read())
        assert full.reason is Reason.NO_SLOT_AVAILABLE, "tools it takes"
        busy.cancel()


async def test_model_with_unknown_capabilities_is_sent_every_request(tmp_path: Path) -> None:
    async with (
        run_fake_backend(dialect=Dialect(lacks=("/props",))) as fake,
        running_runner(tmp_path, [attached(fake.base_url)]) as runner,
    ):
        state = await runner.until(Phase.READY)
        assert not state.HasField("abilities")
        events = await events_of(runner.generate(messages=SEEING, tools=[TOOL], thinking=True))
        assert events[-1].WhichOneof("event") == "finished"


async def test_attached_llama_cpp_server_is_queried_for_model_capabilities(tmp_path: Path) -> None:
    """It was sent images that it refused, with a slot taken for each."""
    async with (
        run_fake_backend("--text-only") as fake,
        running_runner(tmp_path, [attached(fake.base_url)]) as runner,
    ):
        state = await runner.until(Phase.READY)
        assert model_pb2.MODEL_SKILL_IMAGE in state.abilities.lacking
        refused = await refusal(runner.generate(messages=SEEING, tools=[TOOL]).read())
        assert (refused.reason, refused.message) == (
            Reason.MODALITY_UNSUPPORTED,
            "m does not support images and does not support tools",
        )
        assert (await runner.until(Phase.READY)).slots_used == 0


@pytest.mark.slow("starts engine processes")
@pytest.mark.parametrize("projector", [False, True])
async def test_running_server_capabilities_override_the_settings(projector: bool, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    flags = () if projector else ("--text-only",)
    async with running_runner(tmp_path, [supervised(model, *flags, skills=["text", "image", "tools"])]) as runner:
        state = await runner.until(Phase.READY)
        takes = list(state.abilities.skills)
        assert (model_pb2.MODEL_SKILL_IMAGE in takes) is projector, "whatever the settings say"
        if projector:
            assert (await events_of(runner.generate(messages=SEEING)))[-1].WhichOneof("event") == "finished"
        else:
            refused = await refusal(runner.generate(messages=SEEING, tools=[TOOL]).read())
            assert refused.message == "m does not support images and does not support tools"


async def test_input_an_unloaded_model_does_not_accept_is_rejected_without_a_load(tmp_path: Path) -> None:
    """Its engine cannot even be started: the command is none."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("<think>{{ messages[0].content }}")
    model = {"name": "m", "path": str(folder), "start_asleep": True}
    runner_fields = {"name": "r1", "runtime": "ctranslate2", "command": ["/no/program"], "models": [model]}
    section = parse_section(ConfiguredRunner, runner_fields)
    async with running_runner(tmp_path, [served_model(section, section.models[0], 1.0)]) as runner:
        state = await runner.until(Phase.HIBERNATING)
        assert model_pb2.MODEL_SKILL_TOOLS in state.abilities.lacking
        assert list(state.abilities.thinking_modes) == [
            model_pb2.THINKING_MODE_DEFAULT,
            model_pb2.THINKING_MODE_ENABLED,
        ]
        refused = await refusal(runner.generate(tools=[TOOL]).read())
        assert (refused.reason, refused.message) == (Reason.MODALITY_UNSUPPORTED, "m does not support tools")
        refused = await refusal(runner.generate(thinking=False).read())
        assert refused.message == "m does not answer without thinking"


@pytest.mark.parametrize(("modes", "is_warned"), [(["default", "enabled"], True), (["default", "disabled"], False)])
async def test_reasoning_effort_none_yields_a_warning_if_the_model_always_thinks(
    modes: list[str], is_warned: bool, tmp_path: Path
) -> None:
    async with (
        run_fake_backend() as fake,
        ready_runner(tmp_path, [attached(fake.base_url, thinking_modes=modes)]) as runner,
    ):
        events = await events_of(runner.generate(reasoning_effort=chat_pb2.REASONING_EFFORT_NONE))
        warnings = [event.warning for event in events if event.HasField("warning")]
        message = "reasoning_effort: none was ignored: the model does not answer without thinking"
        assert [(warning.field, warning.message) for warning in warnings] == [
            ("reasoning_effort", message) for _ in range(is_warned)
        ]
        assert [warning.message for warning in events[-1].finished.receipt.warnings] == [message] * is_warned


@pytest.mark.slow("starts an ordinary program")
async def test_loading_another_file_updates_the_capabilities(tmp_path: Path) -> None:
    """The file is one of a template without tools, and the server that is started for it says so, too."""
    usual = write_gguf(tmp_path / "usual.gguf")
    other = write_gguf(tmp_path / "other.gguf", template="{% for m in messages %}{{ m.content }}{% endfor %}")
    program = [sys.executable, str(Path(__file__).with_name("server_by_file.py"))]
    model = {"name": "m", "path": str(usual), "quantizations": {"q8_0": str(other)}}
    section = parse_section(ConfiguredRunner, {"name": "r1", "command": program, "models": [model]})
    async with running_runner(tmp_path, [served_model(section, section.models[0], 1.0)]) as runner:
        state = await runner.until(Phase.READY)
        assert model_pb2.MODEL_SKILL_TOOLS in state.abilities.skills
        await runner.load(options=load_pb2.LoadOptions(quantization="q8_0"))
        state = await runner.until_state(lambda now: model_pb2.MODEL_SKILL_TOOLS in now.abilities.lacking)
        assert model_pb2.THINKING_MODE_ENABLED not in state.abilities.thinking_modes
        refused = await refusal(runner.generate(tools=[TOOL]).read())
        assert refused.reason is Reason.MODALITY_UNSUPPORTED
