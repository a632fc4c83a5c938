"""Extra parameters: sent, refused, or left out with a warning."""

import json
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.policy.parameters import (
    CONTROLLED_BY_MESH,
    MAX_EXTRA_PARAMETERS,
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMAR_DEPTH,
    EngineParameters,
    ParameterProfile,
    admit,
)
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER_PARAMETERS
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import PARAMETERS as OPENAI_HTTP_PARAMETERS
from runner_svc.runtimes.openai_remote.runtime import PARAMETERS as OPENAI_REMOTE_PARAMETERS
from runner_svc.runtimes.vllm.runtime import PARAMETERS as VLLM_PARAMETERS
from weft.api.common.v1 import chat_pb2, completion_pb2, sampling_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_extensions.engines.ctranslate2.runtime import PARAMETERS as CTRANSLATE2_PARAMETERS
from weft_extensions.engines.diffusers.runtime import PARAMETERS as DIFFUSERS_PARAMETERS
from weft_extensions.engines.engine_host.text_routes import MAX_REPETITIONS, MAX_SCHEMA_CHARS, schema_fault
from weft_extensions.engines.exllamav3.runtime import PARAMETERS as EXLLAMAV3_PARAMETERS
from weft_extensions.engines.llama_cpp_python.runtime import PARAMETERS as LLAMA_CPP_PYTHON_PARAMETERS

ALLOWED = [
    engine.allowed
    for engine in (
        LLAMA_SERVER_PARAMETERS,
        OPENAI_HTTP_PARAMETERS,
        LLAMA_CPP_PYTHON_PARAMETERS,
        CTRANSLATE2_PARAMETERS,
        DIFFUSERS_PARAMETERS,
        EXLLAMAV3_PARAMETERS,
        VLLM_PARAMETERS,
        OPENAI_REMOTE_PARAMETERS,
    )
]
LLAMA = ParameterProfile(engine=LLAMA_SERVER_PARAMETERS)
ATTACHED = ParameterProfile(engine=OPENAI_HTTP_PARAMETERS)
BINDING = ParameterProfile(engine=LLAMA_CPP_PYTHON_PARAMETERS)
EVERYTHING = ParameterProfile(engine=LLAMA_SERVER_PARAMETERS, passthrough=True)


def test_listed_parameter_is_sent_without_a_warning() -> None:
    admitted = admit({"mirostat": 2, "mirostat_tau": 4.5, "dry_sequence_breakers": ["\n"]}, LLAMA)
    assert admitted.send == {"mirostat": 2, "mirostat_tau": 4.5, "dry_sequence_breakers": ["\n"]}
    assert admitted.warnings == ()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("mirostat", 3, "must be 0 to 2"),
        ("mirostat", 1.0, "must be an integer"),
        ("mirostat", True, "must be an integer"),
        ("typical_p", "0.5", "must be a number"),
        ("typical_p", float("nan"), "must be 0 to 1"),
        ("adaptive_decay", 1, "must be 0 to 0.99"),
        ("ignore_eos", 1, "true or false"),
        ("repeat_last_n", 2**31 - 1, "must be 0 to 65,536"),
        ("dry_penalty_last_n", 65_537, "must be 0 to 65,536"),
        ("samplers", "kft", "must be a list"),
        ("samplers", [], "must be a list of 1 to 16"),
        ("json_schema", "{}", "must be an object"),
        ("json_schema", {"description": "x" * MAX_GRAMMAR_CHARS}, "characters as JSON"),
        ("grammar", "x" * (MAX_GRAMMAR_CHARS + 1), "at most 65,536 characters"),
        ("grammar", "root ::= " + "(" * (MAX_GRAMMAR_DEPTH + 1), "nested brackets"),
    ],
)
def test_invalid_value_is_refused_with_its_parameter(name: str, value: Any, says: str) -> None:
    with fails(Reason.INVALID_ARGUMENT, match=says, field=name):
        admit({name: value}, LLAMA)


def test_invalid_list_entry_is_refused_with_its_position() -> None:
    with fails(field="dry_sequence_breakers[1]"):
        admit({"dry_sequence_breakers": ["a", 1]}, LLAMA)
    with fails(field="stop_token_ids[1]"):
        admit({"stop_token_ids": [1, -1]}, ATTACHED)
    with fails(field="verbosity"):
        admit({"verbosity": "chatty"}, ATTACHED)


def test_grammar_at_the_depth_limit_passes() -> None:
    deep = "root ::= " + "(" * MAX_GRAMMAR_DEPTH + '"a"' + ")" * MAX_GRAMMAR_DEPTH
    wide = "root ::= " + '("a") ' * 1000
    assert admit({"grammar": deep + "\nx ::= " + wide}, LLAMA).warnings == ()


@pytest.mark.parametrize("profile", [LLAMA, ATTACHED, BINDING])
def test_unknown_parameter_is_dropped_with_a_warning(profile: ParameterProfile) -> None:
    admitted = admit({"frobnicate": 1, "typical_p": 0.9}, profile)
    assert admitted.send == {"typical_p": 0.9}
    (warning,) = admitted.warnings
    assert warning.field == "frobnicate"
    assert profile.engine.engine in warning.message


def test_each_engine_has_its_own_list() -> None:
    assert admit({"xtc_probability": 0.1}, LLAMA).send
    assert admit({"xtc_probability": 0.1}, ATTACHED).warnings
    assert admit({"mirostat": 1}, BINDING).warnings
    assert admit({"mirostat_mode": 1}, BINDING).send


@pytest.mark.parametrize("name", ["id_slot", "cache_prompt", "stream", "messages", "n_predict", "lora", "model", "n"])
@pytest.mark.parametrize("profile", [LLAMA, ATTACHED, BINDING, EVERYTHING])
def test_mesh_controlled_parameter_is_never_sent(profile: ParameterProfile, name: str) -> None:
    admitted = admit({name: 1}, profile)
    assert not admitted.send
    assert [warning.field for warning in admitted.warnings] == [name]


@pytest.mark.parametrize("name", ["Stream", "MESSAGES", " model", "max_tokens ", "\u017ftream", "\u212aeep_alive"])
def test_mesh_controlled_parameter_is_not_sent_in_another_case(name: str) -> None:
    """Servers written in Go match the names of fields without case, and the last one wins."""
    admitted = admit({name: 1}, EVERYTHING)
    assert not admitted.send
    assert [warning.field for warning in admitted.warnings] == [name]
    assert admit({"Temperature": 1, "Mirostat": 1}, LLAMA).send == {}


@pytest.mark.parametrize(
    "name",
    ["kv_transfer_params", "bootstrap_host", "lora_path", "custom_logit_processor", "chat_template", "cache_salt"],
)
def test_passthrough_sends_nothing_that_reaches_other_files_servers_or_tenants(name: str) -> None:
    assert not admit({name: "x"}, EVERYTHING).send


def test_passthrough_sends_parameters_unchecked() -> None:
    extra = {"frobnicate": {"deep": [1]}, "mirostat": "yes"}
    assert admit(extra, EVERYTHING).send == extra
    assert admit(extra, EVERYTHING).warnings == ()


def test_null_means_unset() -> None:
    assert admit({"mirostat": None, "frobnicate": None, "id_slot": None}, LLAMA) == admit({}, LLAMA)


def test_too_many_parameters_are_refused() -> None:
    most = {f"p{number}": 1 for number in range(MAX_EXTRA_PARAMETERS)}
    assert len(admit(most, LLAMA).warnings) == MAX_EXTRA_PARAMETERS
    with pytest.raises(FieldError, match="at most 64, are 65"):
        admit({**most, "one": 1}, LLAMA)


def test_warning_about_a_long_name_is_short() -> None:
    (warning,) = admit({"x" * 10_000: 1}, LLAMA).warnings
    assert len(warning.field) <= 64
    assert len(warning.message) <= 500


@pytest.mark.parametrize("name", ["x_priority", "x_client_id", "X_Priority", " x_unheard_of"])
def test_mesh_options_reach_no_engine_in_any_spelling(name: str) -> None:
    admitted = admit({name: "high", "xtc_threshold": 0.5}, EVERYTHING)
    assert admitted.send == {"xtc_threshold": 0.5}
    assert [warning.message for warning in admitted.warnings] == [f"{name} is controlled by the mesh and was not sent"]


def test_lists_contain_no_mesh_controlled_or_contract_fields() -> None:
    contract = {
        field.name
        for message in (chat_pb2.ChatPayload, completion_pb2.CompletionPayload, sampling_pb2.SamplingParams)
        for field in message.DESCRIPTOR.fields
    }
    for rules in ALLOWED:
        assert not set(rules) & CONTROLLED_BY_MESH
        assert not set(rules) & contract


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grammar", 'root ::= "a"{9,2}'),
        ("grammar", 'root ::= "a"{ 9 , 2 }'),
        ("grammar", 'root ::= "a"{1,99999999999}'),
        ("grammar", 'root ::= "a"{1000000}'),
        ("json_schema", {"minLength": 9, "maxLength": 2}),
        ("json_schema", {"pattern": "(?=a)"}),
    ],
)
def test_grammar_or_schema_beside_response_format_is_checked_too(name: str, value: Any) -> None:
    with pytest.raises(FieldError) as refused:
        admit({name: value}, ParameterProfile(engine=LLAMA_SERVER_PARAMETERS))
    assert refused.value.field.startswith(name)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a"{2,9} "b"{3} "c"{2,} "d"{,4}', 'root ::= "{9,2}" [{9,2}] # {9,2}', 'root ::= "\\"{9,2}"'],
)
def test_sequential_repeats_and_braces_in_strings_pass(grammar: str) -> None:
    assert admit({"grammar": grammar}, ParameterProfile(engine=LLAMA_SERVER_PARAMETERS)).send == {"grammar": grammar}


_LONG = {"type": "array", "items": {"type": "string"}, "maxItems": 100_000_000}
_ANY_LENGTH = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("engine", "given", "sent"),
    [
        (LLAMA_SERVER_PARAMETERS, {"json_schema": _LONG}, {"json_schema": _ANY_LENGTH}),
        (VLLM_PARAMETERS, {"structured_outputs": {"json": _LONG}}, {"structured_outputs": {"json": _ANY_LENGTH}}),
        (
            VLLM_PARAMETERS,
            {"structured_outputs": {"json": json.dumps(_LONG)}},
            {"structured_outputs": {"json": _ANY_LENGTH}},
        ),
    ],
)
def test_unreachable_upper_bound_beside_response_format_is_dropped(
    engine: EngineParameters, given: dict[str, Any], sent: dict[str, Any]
) -> None:
    assert admit(given, ParameterProfile(engine=engine)).send == sent


@pytest.mark.parametrize(
    "value",
    [
        {"json": {"minItems": 9, "maxItems": 2}},
        {"json": '{"minItems": 9, "maxItems": 2}'},
        {"json": "{"},
        {"regex": "a{9,2}"},
        {"grammar": 'root ::= "a"{9,2}'},
    ],
)
def test_structured_outputs_are_validated_recursively(value: Any) -> None:
    with pytest.raises(FieldError):
        admit({"structured_outputs": value}, ParameterProfile(engine=VLLM_PARAMETERS))


@pytest.mark.parametrize(
    "schema",
    [
        {"minItems": 10**9},
        {"properties": {"a": [{"maxLength": 1e12}]}},
        {"pattern": "^a{1000000000}$"},
        {"pattern": "^a{1,99999999999999999999999999}$"},
        {"pattern": "^a{2001,}$"},
        {"description": "x" * MAX_SCHEMA_CHARS},
    ],
)
def test_schema_that_expands_endlessly_is_refused(schema: dict[str, Any]) -> None:
    assert schema_fault(json.dumps(schema))


def test_ordinary_schema_and_one_at_the_limit_pass() -> None:
    ordinary = {"properties": {"minItems": {"type": "integer", "minimum": 5000}}, "pattern": "^\\d{5}(-\\d{4})?$"}
    for schema in (ordinary, {"minItems": MAX_REPETITIONS}, {"minItems": "many", "pattern": 3}, True):
        assert schema_fault(json.dumps(schema)) == ""


def _profile(runtime: str, **fields: Any) -> ParameterProfile:
    place = {"url": "http://box.lan:8000/v1"} if runtime == "openai_http" else {"path": "/models/m.gguf"}
    section = parse_section(
        ConfiguredRunner,
        {"name": "r1", "runtime": runtime, "command": ["server"], "models": [{"name": "m1", **place, **fields}]},
    )
    backend = served_model(section, section.models[0], 5.0).make_backend()
    assert isinstance(backend, LlamaServerBackend | AttachedServer)
    return backend.parameters


@pytest.mark.parametrize(
    ("runtime", "engine"), [("llama_server", LLAMA_SERVER_PARAMETERS), ("openai_http", OPENAI_HTTP_PARAMETERS)]
)
def test_model_has_the_configured_parameter_profile(runtime: str, engine: EngineParameters) -> None:
    assert _profile(runtime) == ParameterProfile(engine=engine)
    asked = _profile(runtime, passthrough="all", thinking=False)
    assert asked == ParameterProfile(engine=engine, passthrough=True, thinking=False)
