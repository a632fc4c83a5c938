"""vLLM's command line, environment, load stages, figures and memory, by its settings and a load's order."""

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.peft_folder import write_peft_adapter
from kit.presence import present

from runner_svc.backend.port import LoadOrder
from runner_svc.memory.estimate import ForecastModel, MemoryEstimator, ModelFiles, read_model_facts
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from runner_svc.policy.memory_estimate import CONTEXT_STEP, MEBIBYTE, EstimateSource, ModelShape
from runner_svc.runtimes.kv_events import FLAG
from runner_svc.runtimes.metrics_page import MAX_COUNT
from runner_svc.runtimes.vllm.arguments import (
    adapter_bodies,
    configured_parameters,
    load_parameters,
    operations_of,
    server_arguments,
    server_environment,
)
from runner_svc.runtimes.vllm.model import VllmForecast
from runner_svc.runtimes.vllm.runtime import RUNTIME, VllmAdapter, VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend, load_share, read_load
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.load_parameters import check_parameters
from weft.kernel.requests.request_values import Operation, Skill
from weft_app.config.loader import parse_config

TWO_DEVICES = LoadOrder(
    shares=(DeviceBytes(device_index=0, bytes=2**30), DeviceBytes(device_index=3, bytes=2**30)), hides_devices=True
)
SHAPE = ModelShape(weight_bytes=2**28, keys_per_token=5760, values_per_token=5760, layers=30, vocabulary=49_152)
"""SmolLM2's: 23,040 bytes per token in 16 bits."""
BLOCK = 128


def _model(**settings: Any) -> VllmModel:
    model, _ = engine_settings(VllmModel, **{"model": "org/model", **settings})
    return model


def _value(arguments: Sequence[str], flag: str) -> str:
    assert arguments.count(flag) == 1, f"{flag} in {arguments}"
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("settings", "flag", "written"),
    [
        ({"name": "smol"}, "--served-model-name", "smol"),
        ({"kept_prompts_mb": 1536}, "--kv-offloading-size", "1.5"),
        ({"kept_prompts_mb": 1536}, "--kv-offloading-backend", "native"),
        ({"context_tokens": 8192}, "--max-model-len", "8192"),
        ({"slots": 1}, "--max-num-seqs", "1"),
        ({"dtype": "bfloat16"}, "--dtype", "bfloat16"),
        ({"kv_cache_memory_bytes": 2**30}, "--kv-cache-memory-bytes", str(2**30)),
        ({"kv_cache_memory_bytes": 2**30}, "--gpu-memory-utilization", "0.01"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "fp8"),
        ({"gpu_memory_utilization": 0.85}, "--gpu-memory-utilization", "0.85"),
        ({"tensor_parallel": 4}, "--tensor-parallel-size", "4"),
        ({"pipeline_parallel": 2}, "--pipeline-parallel-size", "2"),
        ({"tool_call_parser": "hermes"}, "--tool-call-parser", "hermes"),
        ({"kind": "embedding"}, "--runner", "pooling"),
        ({"limit_mm_per_prompt": {"image": 1}}, "--limit-mm-per-prompt", '{"image": 1}'),
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "--mm-processor-kwargs", '{"max_pixels": 9}'),
    ],
)
def test_setting_maps_to_its_flag(settings: dict[str, Any], flag: str, written: str) -> None:
    assert _value(server_arguments(_model(**settings), LoadOrder()), flag) == written


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"prefix_caching": True}, "--enable-prefix-caching"),
        ({"prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"tool_call_parser": "hermes"}, "--enable-auto-tool-choice"),
    ],
)
def test_setting_without_a_value_is_a_flag_only_if_enabled(settings: dict[str, Any], flag: str) -> None:
    assert flag in server_arguments(_model(**settings), LoadOrder())
    assert flag not in server_arguments(_model(), LoadOrder())


def test_model_is_a_folder_or_an_id(tmp_path: Path) -> None:
    assert server_arguments(_model(), LoadOrder())[:2] == ["serve", "org/model"]
    assert server_arguments(_model(model=str(tmp_path)), LoadOrder())[:2] == ["serve", str(tmp_path)]


def test_cached_token_details_are_always_enabled_and_extra_arguments_come_last() -> None:
    arguments = server_arguments(_model(extra_arguments=("--load-format", "dummy")), LoadOrder())
    assert "--enable-prompt-tokens-details" in arguments
    assert arguments[-2:] == ["--load-format", "dummy"]


def test_request_times_are_enabled_unless_statistics_are_off() -> None:
    """With both flags vLLM refuses to start."""
    flag = "--enable-per-request-metrics"
    assert flag in server_arguments(_model(), LoadOrder())
    assert flag not in server_arguments(_model(extra_arguments=("--disable-log-stats",)), LoadOrder())
    assert flag not in server_arguments(_model(kind="embedding"), LoadOrder())


def test_speculation_is_one_document() -> None:
    drafting = {"method": "mtp", "model": "org/assistant", "moe_backend": "triton", "num_speculative_tokens": 8}
    model = _model(speculative_config=drafting)
    assert json.loads(_value(server_arguments(model, LoadOrder()), "--speculative-config")) == drafting
    fewer = LoadOrder(parameters={"speculative_tokens": 2})
    assert json.loads(_value(server_arguments(model, fewer), "--speculative-config"))["num_speculative_tokens"] == 2
    off = LoadOrder(parameters={"speculative_method": "none"})
    assert "--speculative-config" not in server_arguments(model, off)
    assert "--speculative-config" not in server_arguments(_model(), fewer)
    assert configured_parameters(model)["speculative_tokens"] == 8


@pytest.mark.parametrize(
    ("name", "value", "flag", "written"),
    [
        ("context_tokens", 512, "--max-model-len", "512"),
        ("slots", 2, "--max-num-seqs", "2"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype", "fp8"),
        ("kv_cache_memory_bytes", 2**20, "--kv-cache-memory-bytes", str(2**20)),
        ("max_pixels", 7, "--mm-processor-kwargs", '{"max_pixels": 7}'),
        ("speculative_method", "ngram", "--speculative-config", '{"method": "ngram"}'),
    ],
)
def test_load_parameter_takes_precedence_over_the_setting(name: str, value: Any, flag: str, written: str) -> None:
    model = _model(context_tokens=4096, kv_cache_memory_bytes=2**30, mm_processor_kwargs={"max_pixels": 9})
    checked = check_parameters({name: value}, load_parameters(model))
    assert _value(server_arguments(model, LoadOrder(parameters=checked)), flag) == written


def test_cache_has_room_for_every_slot_if_the_files_declare_its_size() -> None:
    model = _model(slots=2, context_tokens=1024)
    size = int(_value(server_arguments(model, LoadOrder(), SHAPE), "--kv-cache-memory-bytes"))
    needed = 2 * (1024 + BLOCK) * 23_040
    assert needed <= size < needed + MEBIBYTE
    halved = LoadOrder(parameters={"kv_cache_dtype": "fp8"})
    smaller = int(_value(server_arguments(model, halved, SHAPE), "--kv-cache-memory-bytes"))
    assert smaller < size / 2 + MEBIBYTE
    assert "--kv-cache-memory-bytes" not in server_arguments(_model(), LoadOrder(), None)
    assert "--kv-cache-memory-bytes" not in server_arguments(_model(gpu_memory_utilization=0.5), LoadOrder(), SHAPE)


def test_all_leased_devices_are_used_unless_configured_otherwise() -> None:
    assert _value(server_arguments(_model(), TWO_DEVICES), "--tensor-parallel-size") == "2"
    assert "--tensor-parallel-size" not in server_arguments(_model(pipeline_parallel=2), TWO_DEVICES)
    assert "--tensor-parallel-size" not in server_arguments(_model(), LoadOrder())
    one = int(_value(server_arguments(_model(), LoadOrder(), SHAPE), "--kv-cache-memory-bytes"))
    each = int(_value(server_arguments(_model(), TWO_DEVICES, SHAPE), "--kv-cache-memory-bytes"))
    assert one / 2 <= each < one / 2 + MEBIBYTE


def test_sleep_mode_is_enabled_only_on_devices() -> None:
    model = _model(sleep_level=1)
    assert "--enable-sleep-mode" in server_arguments(model, TWO_DEVICES)
    assert "--enable-sleep-mode" not in server_arguments(model, LoadOrder(shares=()))
    assert "--enable-sleep-mode" not in server_arguments(_model(), TWO_DEVICES)


def test_runner_variables_override_defaults_but_not_those_weft_requires() -> None:
    usual = server_environment(_model(threads=3), LoadOrder(), {})
    assert (usual["OMP_NUM_THREADS"], usual["VLLM_NO_USAGE_STATS"]) == ("3", "1")
    given = {"OMP_NUM_THREADS": "7", "VLLM_USE_FLASHINFER_SAMPLER": "1", "VLLM_SERVER_DEV_MODE": "0"}
    added = server_environment(_model(), TWO_DEVICES, given)
    assert added.keys() & given.keys() == {"VLLM_SERVER_DEV_MODE"}
    assert added["VLLM_SERVER_DEV_MODE"] == "1"
    assert added["CUDA_VISIBLE_DEVICES"] == "0,3"


def test_hub_is_offline_for_a_model_in_a_folder(tmp_path: Path) -> None:
    assert server_environment(_model(model=str(tmp_path)), LoadOrder(), {})["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in server_environment(_model(), LoadOrder(), {})
    drafting = _model(model=str(tmp_path), speculative_config={"method": "mtp", "model": "org/a"})
    assert "HF_HUB_OFFLINE" not in server_environment(drafting, LoadOrder(), {})


def test_each_model_kind_has_its_operations() -> None:
    assert operations_of(_model()) == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    assert operations_of(_model(kind="embedding")) == {Operation.EMBEDDING, Operation.TOKENIZE}
    assert operations_of(_model(kind="reranking")) == {Operation.RERANK, Operation.TOKENIZE}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"extra_arguments": ("--quiet", "--max-num-seqs", "1")}, "extra_arguments[1]"),
        ({"extra_arguments": ("--port=80",)}, "extra_arguments[0]"),
        ({"extra_arguments": ("--api-key", "x")}, "extra_arguments[0]"),
        ({"kind": "embedding", "tool_call_parser": "hermes"}, "tool_call_parser"),
        ({"kind": "embedding", "speculative_config": {"method": "ngram"}}, "speculative_config"),
    ],
)
def test_contradicting_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    model, context = engine_settings(VllmModel, command=("vllm",), model="org/model", **settings)
    with fails(field=f"model.{field}"):
        RUNTIME.build(model, context)


def test_missing_program_error_shows_the_install_command() -> None:
    model, context = engine_settings(VllmModel, model="org/model")
    with pytest.raises(Exception, match="weft runtime install vllm"):
        RUNTIME.build(model, context)


@pytest.mark.parametrize(
    "settings", [{}, {"prefix_caching": False, "kept_prompts_mb": 9}, {"kind": "embedding", "kept_prompts_mb": 9}]
)
def test_prompts_are_kept_in_main_memory_only_if_they_are_cached_and_memory_is_set(settings: dict[str, Any]) -> None:
    assert "--kv-offloading-size" not in server_arguments(_model(**settings), LoadOrder())


@pytest.mark.parametrize(
    ("settings", "reports"),
    [
        ({}, True),
        ({"kv_events": False}, False),
        ({"command": ("vllm",)}, False),
        ({"command": ("vllm",), "kv_events": True}, True),
        ({"kv_events": True, "prefix_caching": False}, False),
        ({"kv_events": True, "kind": "embedding"}, False),
        ({"kv_events": True, "extra_arguments": ["--data-parallel-size=2"]}, False),
        ({"kv_events": True, "extra_arguments": [FLAG, "{}"]}, False),
    ],
    ids=str,
)
def test_blocks_are_reported_by_the_installed_version_and_where_the_settings_say_so(
    settings: dict[str, Any], reports: bool
) -> None:
    model, context = engine_settings(VllmModel, model="org/model", **settings)
    installed = SimpleNamespace(environment_program=lambda *_: Path("vllm"))
    backend = RUNTIME.build(model, replace(context, environments=installed)).make_backend()  # type: ignore[arg-type]
    assert (backend.prefix_reports is not None) is reports


def test_runner_api_variables_apply_to_unset_settings(tmp_path: Path) -> None:
    environment = {"VLLM_GPU_MEMORY_UTILIZATION": "0.9", "VLLM_ENABLE_PREFIX_CACHING": "false"}

    def arguments(**settings: Any) -> list[str]:
        given = {"command": ("vllm",), "model": str(tmp_path), "environment": environment, **settings}
        backend = RUNTIME.build(*engine_settings(VllmModel, **given)).make_backend()
        assert isinstance(backend, VllmBackend)
        return backend.arguments(LoadOrder(), 0)

    assert _value(arguments(), "--gpu-memory-utilization") == "0.9"
    assert "--no-enable-prefix-caching" in arguments()
    configured = arguments(gpu_memory_utilization=0.5, prefix_caching=True)
    assert _value(configured, "--gpu-memory-utilization") == "0.5"
    assert "--enable-prefix-caching" in configured


@pytest.mark.parametrize(
    "environment", [{"VLLM_GPU_MEMORY_UTILIZATION": "2"}, {"VLLM_ENABLE_PREFIX_CACHING": "maybe"}], ids=str
)
def test_invalid_variable_error_names_it(environment: dict[str, str]) -> None:
    given = engine_settings(VllmModel, command=("vllm",), model="a/b", environment=environment)
    with fails(field=next(iter(environment))):
        RUNTIME.build(*given)


def test_vision_model_declares_image_support() -> None:
    seeing = engine_settings(VllmModel, command=("vllm",), model="a/b", limit_mm_per_prompt={"image": 1})
    assert RUNTIME.build(*seeing).capabilities.skills == {Skill.TEXT, Skill.IMAGE}
    plain = engine_settings(VllmModel, command=("vllm",), model="a/b")
    assert RUNTIME.build(*plain).capabilities.skills == {Skill.TEXT}
    assert RUNTIME.build(*plain).capabilities.lacking == frozenset(), "the model may take them"
    blind = engine_settings(VllmModel, command=("vllm",), model="a/b", limit_mm_per_prompt={"image": 0})
    assert RUNTIME.build(*blind).capabilities.lacking == {Skill.IMAGE}


def _adapters(*folders: Path | str) -> dict[str, Any]:
    return {"adapters": tuple(VllmAdapter(name=f"a{at}", path=str(folder)) for at, folder in enumerate(folders))}


def test_adapters_are_modules_on_the_device_and_requests_name_them(tmp_path: Path) -> None:
    local = write_peft_adapter(tmp_path / "local")
    model = _model(name="smol", **_adapters(local, "org/other"))
    words = server_arguments(model, LoadOrder())
    at = words.index("--lora-modules")
    assert words[at : at + 3] == ["--lora-modules", f"a0={local}", "a1=org/other"]
    assert "--enable-lora" in words
    assert _value(words, "--max-lora-rank") == "16"
    assert (_value(words, "--max-loras"), _value(words, "--max-cpu-loras")) == ("2", "2")
    assert adapter_bodies(model) == {"": {"model": "smol"}, "a0": {"model": "a0"}, "a1": {"model": "a1"}}
    assert adapter_bodies(_model()) == {}


def test_hub_is_offline_only_if_every_adapter_is_a_folder(tmp_path: Path) -> None:
    local = write_peft_adapter(tmp_path / "local")
    model = {"model": str(tmp_path)}
    assert "HF_HUB_OFFLINE" in server_environment(_model(**model, **_adapters(local)), LoadOrder(), {})
    assert "HF_HUB_OFFLINE" not in server_environment(_model(**model, **_adapters(local, "org/b")), LoadOrder(), {})


def test_unloadable_adapters_are_refused_with_their_setting(tmp_path: Path) -> None:
    good = write_peft_adapter(tmp_path / "good")
    bare = write_peft_adapter(tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    rankless = write_peft_adapter(tmp_path / "rankless")
    (rankless / "adapter_config.json").write_text("{}")
    broken = write_peft_adapter(tmp_path / "broken")
    (broken / "adapter_config.json").write_bytes(b'{"\xff": 8}')
    huge = write_peft_adapter(tmp_path / "huge")
    (huge / "adapter_config.json").write_text('{"r": 513}')
    faults: list[tuple[dict[str, Any], str, str]] = [
        (_adapters(good, tmp_path / "nowhere"), "adapters[1].path", "there is no folder"),
        (_adapters(bare), "adapters[0].path", "no adapter_model.safetensors"),
        (_adapters(rankless), "adapters[0].path", "has no LoRA rank"),
        (_adapters(broken), "adapters[0].path", "has no LoRA rank"),
        (_adapters(huge), "adapters[0].path", "has a rank of 513, and vLLM supports at most 512"),
        ({**_adapters(good), "kind": "embedding"}, "adapters", "not embedding"),
    ]
    for settings, field, words in faults:
        given = engine_settings(VllmModel, command=("vllm",), model="org/model", **settings)
        with fails(match=words, field=f"model.{field}"):
            RUNTIME.build(*given)


def test_settings_are_read_from_a_configuration() -> None:
    model = {
        "name": "qwen",
        "model": "/models/qwen",
        "kv_cache_memory_bytes": 2**30,
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_kwargs": {"max_pixels": 4014080, "do_resize": True},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "environment": {"VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"},
    }
    config = parse_config({"runners": [{"name": "gpu", "runtime": "vllm", "models": [model]}]})
    assert config.runners is not None
    found = config.runners[0].models[0]
    assert isinstance(found, VllmModel)
    assert found.limit_mm_per_prompt == {"image": 1}
    assert found.speculative_config == {"method": "mtp", "num_speculative_tokens": 3}
    assert found.mm_processor_kwargs == {"max_pixels": 4014080, "do_resize": True}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("kv_cache_memory_bytes", 0),
        ("tensor_parallel", 65),
        ("sleep_level", 3),
        ("dtype", "int3"),
        ("speculative_config", {"method": ["mtp"]}),
        ("limit_mm_per_prompt", {"smell": 1}),
        ("kv_cache_dtype", "--flag"),
        ("model", "--flag"),
        ("start_timeout_seconds", 0),
    ],
)
def test_out_of_range_value_is_refused_by_name(name: str, value: Any) -> None:
    model = {"name": "qwen", "model": "/models/qwen", name: value}
    with pytest.raises(FieldError, match=name):
        parse_config({"runners": [{"name": "gpu", "runtime": "vllm", "models": [model]}]})


REAL_LOAD = (
    (0.0, "(APIServer pid=1) INFO 11-21 23:19:48 [api_utils.py:347]   version 0.32.0"),
    (0.0, "(EngineCore pid=2) INFO 11-21 23:26:29 [core.py:133] Initializing a V1 LLM engine (v0.32.0)"),
    (0.1, "(Worker pid=3) INFO 11-21 23:27:11 [cpu_model_runner.py:68] Starting to load model x..."),
    (
        0.35,
        "Loading safetensors checkpoint shards:   0% Completed\rLoading:  50% Completed | 1/2",
    ),
    (0.6, "Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:01<00:00,  1.19s/it]"),
    (0.6, "(Worker pid=3) INFO 11-21 23:27:12 [default_loader.py:501] Loading weights took 1.20 seconds"),
    (0.6, "(EngineCore pid=2) INFO [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum"),
    (0.85, "Capturing CUDA graphs (decode, FULL):  50%|#####     | 5/10 [00:01<00:01]"),
    (0.85, "Loading safetensors checkpoint shards: 100% Completed"),
    (0.95, "(EngineCore pid=2) INFO [core.py:402] init engine (profile, create kv cache) took 1.67 s"),
    (0.95, "(APIServer pid=1) INFO 11-21 23:27:25 [entry.py:140] Starting vLLM server on unix:/tmp/x"),
)


def test_loaded_share_follows_the_output_and_never_falls() -> None:
    done = 0.0
    for share, line in REAL_LOAD:
        done = max(done, load_share(line))
        assert done == pytest.approx(share), line


PAGE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smol"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.123456
vllm:prefix_cache_queries_total{engine="0",model_name="smol"} 456.0
vllm:prefix_cache_queries_created{engine="0",model_name="smol"} 1.7953036423055384e+09
vllm:prefix_cache_hits_total{engine="0",model_name="smol"} 128.0
vllm:num_preemptions_total{engine="0",model_name="smol"} 1.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",num_gpu_blocks="364"} 1.0
"""


def test_metrics_page_figures_are_read() -> None:
    load = read_load(PAGE)
    assert (load.running_count, load.waiting_count, load.preemption_count) == (3, 2, 1)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (456, 128)
    assert (load.kv_cache_share, load.kv_cache_tokens) == (0.12, 46_592)


@pytest.mark.parametrize(("label", "size"), [("1073741824", 2**30), ("None", None), ("", None), ("-5", None)])
def test_configured_cache_size_is_read(label: str, size: int | None) -> None:
    load = read_load(f'vllm:cache_config_info{{block_size="16",kv_cache_memory_bytes="{label}"}} 1.0')
    assert (load.kv_cache_bytes if load.HasField("kv_cache_bytes") else None) == size


def test_cache_size_is_the_sum_over_all_devices() -> None:
    page = 'vllm:cache_config_info{block_size="16",kv_cache_memory_bytes="1048576"} 1.0'
    assert read_load(page, devices=4).kv_cache_bytes == 2**22


def test_several_engines_are_summed_and_the_fullest_cache_counts() -> None:
    load = read_load(PAGE + PAGE.replace('engine="0"', 'engine="1"').replace("0.123456", "0.5"))
    assert (load.running_count, load.kv_cache_tokens, load.kv_cache_share) == (6, 2 * 46_592, 0.5)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "vllm:num_requests_running{} NaN\n",
        "vllm:num_requests_running -1\n",
        "vllm:num_requests_running 1e300\n",
        "vllm:num_requests_running{" + "x" * 10_000 + "} 1\n",
        'vllm:cache_config_info{block_size="-1",num_gpu_blocks="None"} 1.0\n',
        'vllm:cache_config_info{block_size="' + "9" * 400 + '",num_gpu_blocks="2"} 1.0\n',
        "llamacpp:requests_processing 3\n",
    ],
)
def test_page_without_usable_figures_leaves_them_unknown(page: str) -> None:
    load = read_load(page)
    assert not load.HasField("running_count")
    assert not load.HasField("kv_cache_tokens")


def test_counts_are_bounded() -> None:
    line = f'vllm:num_preemptions_total{{engine="0"}} {float(MAX_COUNT)}\n'
    assert read_load(line * 2).preemption_count == MAX_COUNT


def _folder(folder: Path) -> Path:
    """Writes the head of a model of SmolLM2's shape, whose weights are a hole."""
    tensors = {"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2**20]}}
    head = json.dumps(tensors).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + 2**20)
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _forecast(folder: Path, **settings: Any) -> VllmForecast:
    model = _model(model=str(folder), **settings)
    facts = read_model_facts(folder)
    forecast = ForecastModel(
        name=model.location,
        files=ModelFiles(path=folder),
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters=configured_parameters(model),
    )
    return VllmForecast(forecast, MemoryEstimator(), model, facts.shape)


async def _context_bytes(forecast: VllmForecast, plan: LoadPlan = AS_CONFIGURED) -> int:
    estimate = present(await forecast.expect(plan))
    assert estimate.source is EstimateSource.HEADER
    return next(part.bytes for part in estimate.parts if part.name == "context")


async def test_forecast_uses_the_configured_cache_for_any_slot_count(tmp_path: Path) -> None:
    forecast = _forecast(_folder(tmp_path), kv_cache_memory_bytes=512 * MEBIBYTE, slots=2, context_tokens=1024)
    assert await _context_bytes(forecast) == pytest.approx(512 * MEBIBYTE, rel=0.02)
    twice = LoadPlan(parameters={"kv_cache_memory_bytes": 1024 * MEBIBYTE})
    assert await _context_bytes(forecast, twice) == pytest.approx(1024 * MEBIBYTE, rel=0.02)


async def test_forecast_of_an_automatic_cache_matches_the_vllm_flag(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    model = _model(model=str(folder), slots=2, context_tokens=1024)
    given = server_arguments(model, LoadOrder(), read_model_facts(folder).shape)
    expected = int(_value(given, "--kv-cache-memory-bytes"))
    # The estimate rounds the context of each slot to steps of its own.
    rounding = 2 * CONTEXT_STEP * 23_040
    found = await _context_bytes(_forecast(folder, slots=2, context_tokens=1024))
    assert found == pytest.approx(expected, abs=rounding)
