"""From a configuration section to what a model's chats are like."""

from typing import Any
from zoneinfo import ZoneInfo

import pytest

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.policy.signals import reason_only
from weft.api.common.v1 import sampling_pb2
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.served_models import chat_settings
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

TOOLS = [
    {"type": "python", "name": "word_count", "function": "tools:word_count"},
    {"type": "mcp_command", "name": "files", "argv": ["files-server"]},
]
LEGAL = {"name": "NEEDS_LEGAL", "description": "When a lawyer must look.", "asks_for_decision": True}


def _settings(model: dict[str, Any] | None = None, **fields: Any) -> ChatSettings:
    given = {"name": "m1", "path": "/models/m.gguf", **(model or {})}
    section = parse_section(ConfiguredRunner, {"name": "r1", "models": [given], **fields})
    return chat_settings(section, section.models[0])


def test_empty_section_gives_the_defaults() -> None:
    assert _settings() == ChatSettings()


def test_model_sampling_parameters_are_applied() -> None:
    found = _settings({"default_params": {"temperature": 0.2, "stop": ["END"]}}).default_params
    assert found == sampling_pb2.SamplingParams(temperature=0.2, stop=["END"])


def test_every_setting_is_applied() -> None:
    found = _settings(
        {"tools": ["word_count", "files.read"], "repetition": "kill"},
        tools=TOOLS,
        signals=[LEGAL],
        max_tool_iterations=3,
        time_zone="Europe/Berlin",
        platform_context="An office.",
    )
    assert found.tools == ("word_count", "files.read")
    assert found.repetition == "kill"
    assert found.max_tool_iterations == 3
    assert found.zone == ZoneInfo("Europe/Berlin")
    assert found.platform_context == "An office."
    assert found.signals["NEEDS_LEGAL"].asks_for_decision
    assert found.signals["NEEDS_LEGAL"].parameters == reason_only()
    assert "LOW_CONFIDENCE" in found.signals


@pytest.mark.parametrize(
    ("runner", "model", "begins"), [(True, None, True), (True, False, False), (False, True, True), (False, None, False)]
)
def test_model_overrides_the_platform_prompt_of_its_runner(runner: bool, model: bool | None, begins: bool) -> None:
    given = {} if model is None else {"platform_prompt": model}
    assert _settings(given, platform_prompt=runner).platform_prompt is begins


def test_model_overrides_platform_prompt_settings_of_its_runner() -> None:
    assert _settings({}, platform_context="An office.").platform_context == "An office."
    assert _settings({"platform_context": "A lab."}, platform_context="An office.").platform_context == "A lab."
    assert _settings({"platform_context": ""}, platform_context="An office.").platform_context == ""


@pytest.mark.parametrize(
    ("model", "fields", "field"),
    [
        ({"tools": ["weather"]}, {"tools": TOOLS}, "runners.r1.models.m1.tools[0]"),
        ({"tools": ["word_count", "files"]}, {"tools": TOOLS}, "runners.r1.models.m1.tools[1]"),
        ({"tools": ["word_count.x"]}, {"tools": TOOLS}, "runners.r1.models.m1.tools[0]"),
        ({}, {"time_zone": "Mars/Olympus"}, "runners.r1.time_zone"),
        ({"default_params": {"temprature": 1}}, {}, "runners.r1.models.m1.default_params.temprature"),
        ({"default_params": {"temperature": 3}}, {}, "runners.r1.models.m1.default_params.temperature"),
        ({"default_params": {"max_tokens": 3}}, {}, "runners.r1.models.m1.default_params.max_tokens"),
        ({"default_params": {"thinking": True}}, {}, "runners.r1.models.m1.default_params.thinking"),
        ({"default_params": {"reasoning_effort": "huge"}}, {}, "runners.r1.models.m1.default_params.reasoning_effort"),
        ({}, {"time_zone": "../../etc/passwd"}, "runners.r1.time_zone"),
        ({}, {"time_zone": "Europe"}, "runners.r1.time_zone"),
        ({}, {"signals": [LEGAL, LEGAL]}, "runners.r1.signals.NEEDS_LEGAL"),
        ({}, {"signals": [{**LEGAL, "parameters": {"type": "array"}}]}, "runners.r1.signals.NEEDS_LEGAL.parameters"),
    ],
)
def test_invalid_setting_error_names_its_field(model: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as raised:
        _settings(model, **fields)
    assert raised.value.field == field
