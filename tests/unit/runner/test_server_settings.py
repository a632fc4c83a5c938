"""The settings of server programs: placeholders, what must be set, and what contradicts another setting;
attached servers and timeouts."""

from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails
from kit.presence import present

from runner_svc.backend.port import LoadOrder
from runner_svc.followed_servers import record_models, remembered_of, server_record
from runner_svc.memory.estimate import DeclaredForecast
from runner_svc.policy.followed_models import FollowedModel
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import MEBIBYTE, EstimateSource
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.placeholders import filled, placeholders_of
from runner_svc.runtimes.server.runtime import PLACEHOLDERS, check_template
from runner_svc.runtimes.server.server_backend import ServerBackend
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.model_source import ServerSource
from weft.kernel.requests.request_values import Operation
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

ANY_PROGRAM: dict[str, Any] = {"command": ["serve", "--port", "{port}"]}


def _section(runner: dict[str, Any] | None = None, **model: Any) -> ConfiguredRunner:
    values = {"name": "r1", "runtime": "server", "models": [{"name": "m1", **model}], **(runner or {})}
    return parse_section(ConfiguredRunner, values)


def _backend(runner: dict[str, Any] | None = None, **model: Any) -> ServerBackend:
    section = _section(runner, **model)
    backend = served_model(section, section.models[0], 5.0).make_backend()
    assert isinstance(backend, ServerBackend)
    return backend


def _refusal(runner: dict[str, Any] | None = None, **model: Any) -> tuple[str, str]:
    with pytest.raises(FieldError) as refused:
        _backend(runner, **model)
    return refused.value.field, refused.value.message


def test_placeholders_are_filled_and_other_braces_are_kept() -> None:
    values = {name: f"<{name}>" for name in PLACEHOLDERS}
    assert filled("--port={port} {model}/{name}", values) == "--port=<port> <model>/<name>"
    assert filled("{context}x{slots}", values) == "<context>x<slots>"
    assert filled('{"a": {"b": 1}} {{port}} ${port} {{ messages }}', values) == (
        '{"a": {"b": 1}} {port} ${port} {{ messages }}'
    )


def test_unknown_placeholder_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown placeholder \{host\}; there are \{port\}, \{model\}, \{name\}"):
        check_template("--host {host}")
    assert check_template("{{host}}") == "{{host}}"
    field, message = _refusal(command=["serve", "{port}", "{prot}"])
    assert field.endswith("command.2")
    assert "{prot}" in message
    field, message = _refusal(**ANY_PROGRAM, extra_arguments=["{gpu}"])
    assert field.endswith("extra_arguments.0")
    assert "{gpu}" in message
    field, message = _refusal(**ANY_PROGRAM, environment={"A": "{gpu}"})
    assert field.endswith("environment")
    assert "{gpu}" in message


def test_key_is_never_an_argument() -> None:
    field, message = _refusal(command=["serve", "--port", "{port}", "--api-key", "{key}"])
    assert field.endswith("command.4")
    assert "key_variable" in message


def test_placeholder_names_are_found_in_all_texts() -> None:
    assert placeholders_of(["--port={port}", "{{slots}}", "{model} {name}"]) == {"port", "model", "name"}


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({}, "command", "or preset"),
        ({"command": ["serve"]}, "command", "{port}"),
        ({"preset": "sglang"}, "model", "{model}"),
        ({"preset": "vllm", "model": "m"}, "preset", "sglang"),
        (
            {"preset": "sglang", "model": "m", "operations": ["image"]},
            "operations",
            "chat, completion, embedding, rerank, tokenize",
        ),
        (
            {"preset": "tgi", "model": "m", "operations": ["embedding"]},
            "operations",
            "Text Generation Inference offers",
        ),
        ({"preset": "tgi", "model": "m", "environment": {"API_KEY": "k"}}, "environment", "variable of the key"),
        ({**ANY_PROGRAM, "working_folder": "/no/such/folder"}, "working_folder", "no folder"),
        ({**ANY_PROGRAM, "ready": {}}, "ready", "either path or line"),
        ({**ANY_PROGRAM, "ready": {"path": "/ok", "line": "ready"}}, "ready", "either path or line"),
        ({**ANY_PROGRAM, "ready": {"line": "("}}, "ready.line", "regular expression"),
        ({**ANY_PROGRAM, "ready": {"path": "ok"}}, "ready.path", ""),
        ({**ANY_PROGRAM, "key_variable": "A KEY"}, "key_variable", ""),
        ({**ANY_PROGRAM, "path": "m.gguf"}, "path", "command or preset"),
        ({**ANY_PROGRAM, "url": "http://box:1"}, "url", "openai_http"),
    ],
)
def test_unusable_setting_error_names_it(settings: dict[str, Any], field: str, words: str) -> None:
    name, message = _refusal(**settings)
    assert name.endswith(field)
    assert words in message


def test_command_line_is_filled_on_each_start() -> None:
    backend = _backend(
        command=["serve", "--port={port}", "{model}"],
        model="~/weights",
        upstream_model="llama",
        context_tokens=512,
        slots=3,
        extra_arguments=["--as", "{name}", "{context}/{slots}"],
        environment={"LISTEN": "127.0.0.1:{port}", "PLAIN": "yes"},
    )
    arguments = ["serve", "--port=4711", str(Path("~/weights").expanduser()), "--as", "llama", "512/3"]
    assert backend.arguments(LoadOrder(), 4711) == arguments
    environment = backend.environment(LoadOrder())
    assert environment["LISTEN"] == "127.0.0.1:0"
    assert environment["PLAIN"] == "yes"


def test_runner_command_is_the_default_and_is_validated_too() -> None:
    backend = _backend({"command": ["wrapped", "--port", "{port}"]})
    assert backend.arguments(LoadOrder(), 1) == ["wrapped", "--port", "1"]
    field, message = _refusal({"command": ["wrapped", "{port}", "{what}"]})
    assert field.endswith("command")
    assert "{what}" in message


def test_program_without_a_preset_has_default_health_and_operations_and_no_key() -> None:
    backend = _backend(**ANY_PROGRAM)
    assert (backend.health_path, backend.healthy_status, backend.key_variable) == ("/health", 200, "")
    assert backend.operations == {Operation.CHAT, Operation.COMPLETION}
    told = _backend(**ANY_PROGRAM, ready={"path": "/up", "status": 204}, key_variable="K", operations=["embedding"])
    assert (told.health_path, told.healthy_status, told.key_variable) == ("/up", 204, "K")
    assert told.operations == {Operation.EMBEDDING}


async def test_declared_memory_is_the_expected_load_memory() -> None:
    section = _section(**ANY_PROGRAM, memory_mb=100)
    expected = present(await served_model(section, section.models[0], 5.0).forecast.expect(LoadPlan()))
    assert (expected.bytes, expected.source) == (100 * MEBIBYTE, EstimateSource.MANIFEST)
    assert await DeclaredForecast(None).expect(LoadPlan()) is None


@pytest.mark.parametrize("preset", [{}, {"preset": "tgi", "model": "m"}, {"preset": "tabbyapi", "model": "m"}])
def test_program_without_sleep_and_wake_routes_cannot_hibernate_in_process(preset: dict[str, Any]) -> None:
    field, message = _refusal(**(preset or ANY_PROGRAM), sleeps_in_place=True)
    assert field.endswith("sleeps_in_place")
    assert "needs a preset with routes to sleep and to wake, not " in message


BOX = ServerSource(url="http://box:11434")


def word(text: str) -> load_pb2.LoadOptions:
    return load_pb2.LoadOptions(parameters={"api_key_env": load_pb2.LoadValue(word=text)})


def test_record_has_the_variable_of_the_key_and_never_its_value() -> None:
    options = word("BOX_KEY")
    options.parameters["remote"].flag = False
    record = server_record(BOX, "box", options)
    assert (record.server.api_key_env, record.server.HasField("remote"), record.server.remote) == (
        "BOX_KEY",
        True,
        False,
    )


@pytest.mark.parametrize(
    "variable",
    ["WEFT_API_KEY", "WEFT_SERVICE_KEY", "WEFT_JOIN_TOKEN", "WEFT_JOIN_URL", "NOT A NAME", "a" * 200, "9X"],
)
def test_no_mesh_key_is_sent_to_a_server(variable: str) -> None:
    with pytest.raises(FieldError):
        server_record(BOX, "box", word(variable))


def test_other_parameters_are_refused() -> None:
    with fails(field="options.parameters.slots"):
        server_record(BOX, "box", load_pb2.LoadOptions(parameters={"slots": load_pb2.LoadValue(integer=4)}))


def test_server_models_are_remembered() -> None:
    record = server_record(BOX, "box", load_pb2.LoadOptions())
    models = (FollowedModel(name="smol", upstream="acme/smol"), FollowedModel(name="b", upstream="b"))
    record_models(record, models)
    record_models(record, models)
    assert remembered_of(record) == models


LIMITS = {
    "connect_timeout_seconds": 1.0,
    "headers_timeout_seconds": 2.0,
    "first_token_timeout_seconds": 3.0,
    "prefill_liveness_timeout_seconds": 4.0,
    "idle_stream_timeout_seconds": 5.0,
    "absolute_timeout_seconds": 6.0,
}


def _timed(**fields: Any) -> RunnerSettings:
    model = {"name": "m", "path": "m.gguf"}
    return parse_section(ConfiguredRunner, {"name": "r", "models": [model]} | fields)


@pytest.mark.parametrize(("name", "seconds"), LIMITS.items())
def test_every_section_limit_is_a_profile_limit(name: str, seconds: float) -> None:
    profile = _timed(**LIMITS).timeouts
    assert getattr(profile, name.replace("_timeout", "")) == seconds
