"""Arguments and environment of engines over llama.cpp for one load: parameters, devices, files."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.memory_estimate import ModelShape, compute_bytes, settings_for, tokens_at_once
from runner_svc.runtimes.flags import configured_values, tensor_split
from runner_svc.runtimes.llama_props import ServerProps, parse_props
from runner_svc.runtimes.llama_server.arguments import LOAD_FLAGS as SERVER_FLAGS
from runner_svc.runtimes.llama_server.arguments import (
    check_together,
    habits_of,
    load_parameters,
    server_arguments,
)
from runner_svc.runtimes.llama_server.llama_server_backend import note_buffer
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from runner_svc.runtimes.llama_server.xllamacpp_launcher import parse_arguments as parse_launcher_arguments
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.api.registry.v1.runner_pb2 import EngineLoad
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.load_parameters import check_parameters
from weft.kernel.requests.capabilities import EVERY_MODE
from weft.kernel.requests.request_values import Skill
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LOAD_FLAGS, LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel
from weft_extensions.engines.llama_cpp_python.server import CACHE_TYPES, load_settings
from weft_extensions.engines.llama_cpp_python.server import parse_arguments as parse_host_arguments

GIBIBYTE = 2**30
IN_PROCESS = LlamaCppPythonBackend(*engine_settings(LlamaCppPythonModel, path=Path("m.gguf")))
EIGHT = tuple(DeviceBytes(device_index=index, bytes=(10 + index) * GIBIBYTE) for index in range(8))


def _server(**settings: Any) -> LlamaServerModel:
    return engine_settings(LlamaServerModel, command=("llama-server",), path=Path("m.gguf"), name="m", **settings)[0]


SERVER = _server()


def _value(arguments: Sequence[str], flag: str) -> str:
    """Returns the value that counts: that of the last flag."""
    found = [arguments[index + 1] for index, argument in enumerate(arguments) if argument == flag]
    assert found, f"{flag} is not among {arguments}"
    return found[-1]


def test_weight_and_cache_memory_from_the_output_is_summed_over_devices() -> None:
    memory = EngineLoad()
    for line in (
        # As llama.cpp's server prints them (0.5.0, SmolLM2-135M on the CPU, 4 slots of 2,048 tokens).
        "0.00.808.556 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB",
        "0.00.815.645 I llama_context:        CPU  output buffer size =     0.75 MiB",
        "0.00.815.857 I llama_kv_cache:        CPU KV buffer size =   180.00 MiB",
        "0.01.172.965 I sched_reserve:        CPU compute buffer size =    15.51 MiB",
        # And for further devices.
        "0.00.808.560 I load_tensors:        CUDA0 model buffer size =  4095.25 MiB",
        "0.00.815.860 I llama_kv_cache:      CUDA0 KV buffer size =    20.00 MiB",
        "a text about a buffer size = of a MiB",
        "llama_kv_cache: KV buffer size = 99999999999999999999999 MiB",
    ):
        note_buffer(line, memory)
    assert memory == EngineLoad(weight_bytes=round(4187.35 * 2**20), kv_cache_bytes=200 * 2**20)
    nothing = EngineLoad()
    note_buffer("llama_context: CPU compute buffer size = 1.00 MiB", nothing)
    assert nothing == EngineLoad()


@pytest.mark.parametrize(
    ("name", "value", "flag", "written"),
    [
        ("gpu_layers", 20, "--n-gpu-layers", "20"),
        ("gpu_layers", -1, "--n-gpu-layers", "-1"),
        ("flash_attention", "on", "--flash-attn", "on"),
        ("cache_type_k", "q8_0", "--cache-type-k", "q8_0"),
        ("cache_type_v", "bf16", "--cache-type-v", "bf16"),
        ("batch_tokens", 1024, "--batch-size", "1024"),
        ("ubatch_tokens", 128, "--ubatch-size", "128"),
        ("image_max_tokens", 512, "--image-max-tokens", "512"),
        ("spec_type", "ngram-simple", "--spec-type", "ngram-simple"),
        ("spec_draft_n_max", 6, "--spec-draft-n-max", "6"),
        ("spec_draft_p_min", 0.25, "--spec-draft-p-min", "0.25"),
        ("spec_draft_p_min", 1, "--spec-draft-p-min", "1"),
        ("spec_draft_ngl", 0, "--spec-draft-ngl", "0"),
    ],
)
def test_parameter_is_a_server_flag_only_if_given(name: str, value: Any, flag: str, written: str) -> None:
    assert (flag, written) not in pairwise(server_arguments(SERVER))
    assert _value(server_arguments(SERVER, LoadOrder(parameters={name: value})), flag) == written


def test_server_context_is_context_times_slots() -> None:
    arguments = server_arguments(SERVER, LoadOrder(parameters={"context_tokens": 1024, "slots": 3}))
    assert (_value(arguments, "--ctx-size"), _value(arguments, "--parallel")) == ("3072", "3")
    usual = server_arguments(SERVER)
    assert (_value(usual, "--ctx-size"), _value(usual, "--parallel")) == ("8192", "4")


def test_load_options_take_precedence_over_configured_flags() -> None:
    config = _server(extra_arguments=("--ctx-size", "99", "--n-gpu-layers", "5"))
    assert _value(server_arguments(config), "--ctx-size") == "99"
    arguments = server_arguments(config, LoadOrder(parameters={"context_tokens": 512, "gpu_layers": 7}))
    assert _value(arguments, "--ctx-size") == "2048"
    assert _value(arguments, "--n-gpu-layers") == "7"
    assert _value(server_arguments(config, LoadOrder(parameters={"gpu_layers": 7})), "--ctx-size") == "99"


@pytest.mark.parametrize(("slots", "ubatch", "written"), [(3, 512, "510"), (7, 100, "98"), (600, 512, "600")])
def test_embedding_batch_size_is_a_multiple_of_the_slots(slots: int, ubatch: int, written: str) -> None:
    parameters: dict[str, Any] = {"slots": slots, "ubatch_tokens": ubatch}
    assert _value(server_arguments(SERVER, LoadOrder(parameters=parameters)), "--ubatch-size") == written
    plain = _server(embeddings=False)
    assert _value(server_arguments(plain, LoadOrder(parameters=parameters)), "--ubatch-size") == str(ubatch)
    small = server_arguments(SERVER, LoadOrder(parameters={"slots": 4, "batch_tokens": 2}))
    assert (_value(small, "--batch-size"), _value(small, "--ubatch-size")) == ("4", "4")
    assert _value(server_arguments(_server(slots=3)), "--ubatch-size") == "2049"


LARGE = ModelShape(weight_bytes=1, keys_per_token=1, values_per_token=1, layers=1, vocabulary=150_000)
SMALL = replace(LARGE, vocabulary=50_000)


@pytest.mark.parametrize(
    ("context", "shape", "written"),
    [
        (2048, LARGE, "2048"),
        (4096, SMALL, "4096"),
        (8192, replace(LARGE, vocabulary=0), "8192"),
        (8192, LARGE, "2048"),
        (1024, None, "1024"),
        (8192, None, "2048"),
        (100, None, "512"),
    ],
)
def test_embedding_batch_size_covers_the_context(context: int, shape: ModelShape | None, written: str) -> None:
    order = LoadOrder(parameters={"context_tokens": context, "slots": 2})
    arguments = server_arguments(SERVER, order, shape=shape)
    assert _value(arguments, "--ubatch-size") == written
    if int(written) > 2048:
        assert _value(arguments, "--batch-size") == written
    settings = settings_for(context, 2, {}, habits_of(SERVER))
    assert tokens_at_once(shape, settings) == int(written)
    if shape is not None:
        assert compute_bytes(shape, settings) >= int(written) * shape.vocabulary * 4


@pytest.mark.parametrize(("layers", "written"), [(3, "512"), (99, "2048"), (0, "2048")])
def test_partially_offloaded_model_keeps_its_small_batch(layers: int, written: str) -> None:
    order = LoadOrder(parameters={"gpu_layers": layers})
    assert _value(server_arguments(SERVER, order, shape=replace(LARGE, layers=30)), "--ubatch-size") == written


def test_reranking_model_accepts_texts_as_long_as_its_context() -> None:
    ranks = _server(extra_arguments=("--reranking",), embeddings=False)
    assert _value(server_arguments(ranks), "--ubatch-size") == "2048"


def test_another_file_replaces_the_configured_one() -> None:
    order = LoadOrder(model_path=Path("/models/q8_0.gguf"))
    assert _value(server_arguments(SERVER, order), "--model") == "/models/q8_0.gguf"
    assert _value(IN_PROCESS.arguments(order, 0), "--model") == "/models/q8_0.gguf"


def test_single_leased_device_of_eight_is_the_only_one_visible_to_the_engine() -> None:
    for share in EIGHT:
        order = LoadOrder(shares=(share,), hides_devices=True)
        assert hidden_devices(order) == {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": str(share.device_index),
        }
        assert "--tensor-split" not in server_arguments(SERVER, order)


def test_model_on_several_of_eight_devices_is_split_by_its_shares() -> None:
    order = LoadOrder(shares=(EIGHT[1], EIGHT[4], EIGHT[7]), hides_devices=True)
    assert hidden_devices(order)["CUDA_VISIBLE_DEVICES"] == "1,4,7"
    arguments = server_arguments(SERVER, order)
    assert _value(arguments, "--tensor-split") == f"{11 * 1024},{14 * 1024},{17 * 1024}"
    assert _value(arguments, "--split-mode") == "layer"
    host = parse_host_arguments(IN_PROCESS.arguments(order, 0))
    assert host.tensor_split == (11 * 1024, 14 * 1024, 17 * 1024)


def test_model_on_all_eight_devices_has_a_part_for_each() -> None:
    split = tensor_split(LoadOrder(shares=EIGHT, hides_devices=True))
    assert split == [(10 + index) * 1024 for index in range(8)]


def test_visible_unused_devices_have_a_zero_in_the_split() -> None:
    order = LoadOrder(shares=(EIGHT[1], EIGHT[3]))
    assert hidden_devices(order) == {}
    assert tensor_split(order) == [0, 11 * 1024, 0, 13 * 1024]


def test_share_below_a_mebibyte_is_still_a_part() -> None:
    tiny = (DeviceBytes(device_index=0, bytes=1), DeviceBytes(device_index=1, bytes=GIBIBYTE))
    assert tensor_split(LoadOrder(shares=tiny, hides_devices=True)) == [1, 1024]


@pytest.mark.parametrize("hides", [True, False])
def test_empty_shares_mean_no_device_for_any_load_options(hides: bool) -> None:
    order = LoadOrder(shares=(), hides_devices=hides, parameters={"gpu_layers": 99})
    assert hidden_devices(order) == {"CUDA_VISIBLE_DEVICES": ""}
    assert _value(server_arguments(SERVER, order), "--n-gpu-layers") == "0"
    assert parse_host_arguments(IN_PROCESS.arguments(order, 0)).gpu_layers == 0


def test_device_flags_are_omitted_without_a_ledger() -> None:
    assert hidden_devices(LoadOrder()) == {}
    flags = set(server_arguments(SERVER)) | set(IN_PROCESS.arguments(LoadOrder(), 0))
    assert not flags & {"--n-gpu-layers", "--gpu-layers", "--tensor-split", "--split-mode"}


def test_load_context_may_be_at_most_the_trained_context() -> None:
    accepted = load_parameters(SERVER, 8192)
    check_parameters({"context_tokens": 8192}, accepted)
    with fails(field="parameters.context_tokens"):
        check_parameters({"context_tokens": 8193}, accepted)
    check_parameters({"context_tokens": 1_000_000}, load_parameters(SERVER))


def test_load_context_may_reach_an_extended_configured_context() -> None:
    check_parameters({"context_tokens": 32_768}, load_parameters(_server(context_tokens=32_768), 8192))


@pytest.mark.parametrize(
    "parameters",
    [
        {"spec_draft_n_max": 0},
        {"spec_draft_n_max": 7},
        {"spec_draft_p_min": -0.1},
        {"spec_draft_p_min": 1.1},
        {"gpu_layers": -2},
        {"gpu_layers": 1000},
        {"cache_type_k": "q3_k"},
        {"flash_attention": True},
        {"spec_type": "draft-simple"},
        {"slots": 0},
        {"context_tokens": 15},
        {"mmproj": "/etc/passwd"},
    ],
)
def test_out_of_range_values_are_refused_by_name(parameters: dict[str, Any]) -> None:
    with fails(field=f"parameters.{next(iter(parameters))}"):
        check_parameters(parameters, load_parameters(SERVER))


def test_refused_number_error_shows_its_limits() -> None:
    with pytest.raises(FieldError, match=r"must be from 16 to 16777216$"):
        check_parameters({"context_tokens": 15}, load_parameters(SERVER))


def test_quantized_cache_values_need_flash_attention() -> None:
    with pytest.raises(FieldError, match="cache_type_v"):
        check_together({"cache_type_v": "q8_0", "flash_attention": "off"}, "parameters")
    check_together({"cache_type_v": "q8_0"}, "parameters")
    check_together({"cache_type_k": "q8_0", "flash_attention": "off"}, "parameters")
    with pytest.raises(FieldError, match="cache_type_v"):
        IN_PROCESS.check_load({"cache_type_v": "q8_0"})
    IN_PROCESS.check_load({"cache_type_v": "q8_0", "flash_attention": "on"})


def test_ubatch_may_not_exceed_the_batch() -> None:
    with pytest.raises(FieldError, match="ubatch_tokens"):
        check_together({"batch_tokens": 128, "ubatch_tokens": 256}, "parameters")
    check_together({"ubatch_tokens": 256}, "parameters")


def test_host_program_passes_its_options_to_the_library() -> None:
    parameters: dict[str, Any] = {
        "flash_attention": "on",
        "cache_type_k": "q8_0",
        "cache_type_v": "q4_0",
        "batch_tokens": 64,
    }
    check_parameters(parameters, IN_PROCESS.load_parameters)
    options = parse_host_arguments(IN_PROCESS.arguments(LoadOrder(parameters=parameters), 0))
    assert (options.flash_attention, options.cache_type_k, options.cache_type_v) == ("on", "q8_0", "q4_0")
    assert options.batch_tokens == 64
    options.embeddings, options.tensor_split = False, (3.0, 1.0)
    assert load_settings(options) == {
        "flash_attn": True,
        "type_k": 8,
        "type_v": 2,
        "tensor_split": [3.0, 1.0],
        "split_mode": 1,
    }
    assert load_settings(parse_host_arguments(["--model", "m"])) == {}


def test_every_declared_cache_type_has_a_library_number() -> None:
    words = next(one.words for one in IN_PROCESS.load_parameters if one.name == "cache_type_k")
    assert set(words) == set(CACHE_TYPES)


def test_configured_flags_map_to_parameter_names() -> None:
    extra = ("--verbose", "-ngl", "0", "--flash-attn", "off", "-ctk", "q8_0", "--n-gpu-layers", "12", "-ub", "many")
    assert configured_values(extra, SERVER_FLAGS) == {
        "gpu_layers": 12,
        "flash_attention": "off",
        "cache_type_k": "q8_0",
    }
    assert configured_values(("--n-gpu-layers", "all"), SERVER_FLAGS) == {}
    assert configured_values(("--n-gpu-layers",), SERVER_FLAGS) == {}
    assert configured_values(("--gpu-layers", "0", "--batch-tokens", "99999999"), LOAD_FLAGS) == {"gpu_layers": 0}


def test_effective_settings_are_read_from_server_properties() -> None:
    body = b'{"default_generation_settings": {"n_ctx": 512, "x": []}, "total_slots": 2, "chat_template": "{{}}"}'
    props = parse_props(body)
    assert (props.context_tokens, props.slots) == (512, 2)


@pytest.mark.parametrize(
    ("props", "has", "lacks"),
    [
        ({"modalities": {"vision": True, "audio": False}}, {Skill.IMAGE}, {Skill.AUDIO}),
        ({"modalities": {"vision": False, "audio": False}}, set(), {Skill.IMAGE, Skill.AUDIO}),
        ({"modalities": {"vision": "yes"}}, set(), set()),
        ({"modalities": ["vision"]}, set(), set()),
        ({"chat_template_caps": {"supports_tools": False, "supports_tool_calls": False}}, set(), {Skill.TOOLS}),
        ({"chat_template_caps": {"supports_tools": False, "supports_tool_calls": True}}, {Skill.TOOLS}, set()),
        ({"chat_template_caps": {"supports_tools": False}}, set(), set()),
        ({"chat_template": "{{ messages }}"}, {Skill.TEXT}, {Skill.TOOLS}),
        (
            {"chat_template": "{{ messages }}", "chat_template_tool_use": "{{ tools }}"},
            {Skill.TEXT, Skill.TOOLS},
            set(),
        ),
        ({"chat_template": 7}, set(), set()),
    ],
)
def test_server_properties_declare_the_accepted_input(
    props: dict[str, Any], has: set[Skill], lacks: set[Skill]
) -> None:
    found = parse_props(json.dumps(props).encode()).capabilities
    assert found.skills == has
    assert found.lacking == lacks


def test_server_template_declares_its_thinking_switch() -> None:
    found = parse_props(json.dumps({"chat_template": "{% if enable_thinking %}<think>{% endif %}"}).encode())
    assert found.capabilities.thinking_modes == EVERY_MODE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"total_slots": "2"}',
        b'{"total_slots": -1, "default_generation_settings": {"n_ctx": 99999999999}}',
        b'{"total_slots": 1e400}',
        b"[" * 100_000,
    ],
)
def test_invalid_properties_are_ignored(body: bytes) -> None:
    assert parse_props(body) == ServerProps()


@pytest.mark.parametrize(
    ("order", "field"),
    [
        (LoadOrder(parameters={"context_tokens": 512}), "parameters.context_tokens"),
        (LoadOrder(model_path=Path("q8.gguf")), "quantization"),
    ],
)
async def test_attached_server_accepts_no_load_options(order: LoadOrder, field: str) -> None:
    backend = AttachedServer(*engine_settings(OpenAiHttpModel, url="http://127.0.0.1:9/v1", upstream_model="m"))
    assert backend.load_parameters == ()
    with fails(field=field):
        await backend.start(order)


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("-ngl 0", "n_gpu_layers", 0),
        ("--gpu-layers 0", "n_gpu_layers", 0),
        ("-fa off", "flash_attn", "off"),
        ("-ctk q8_0", "cache_type_k", "q8_0"),
        ("-ctv q8_0", "cache_type_v", "q8_0"),
        ("-b 64", "batch_size", 64),
        ("-ub 32", "ubatch_size", 32),
    ],
)
def test_launcher_supports_the_short_llama_server_flags(argument: str, name: str, value: Any) -> None:
    assert configured_values(argument.split(), SERVER_FLAGS), "the estimate reads it"
    assert getattr(parse_launcher_arguments(["--model", "m.gguf", *argument.split()]), name) == value
