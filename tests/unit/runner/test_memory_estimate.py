"""Memory estimates: the best source is used, and the figures are those of real loads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.presence import present

from runner_svc.memory.estimate import (
    MemoryEstimator,
    ModelFacts,
    ModelFiles,
    read_model_facts,
)
from runner_svc.model_files.gguf import GgufHeader
from runner_svc.policy.memory_estimate import (
    CACHE_TYPE_BYTES,
    CONTEXT_STEP,
    GIBIBYTE,
    MAX_NAME_CHARS,
    MEBIBYTE,
    EstimateSource,
    FileKind,
    KnownModel,
    MemorySettings,
    ModelShape,
    compute_bytes,
    context_bytes,
    estimate_memory,
    estimate_shape,
    largest_context,
    names_gguf,
    settings_for,
    weights_from_name,
)
from weft_app.compose.demo import demo_model_path
from weft_extensions.engines.llama_cpp_python.runtime import RUNTIME as LLAMA_CPP_PYTHON

SMOLLM2 = ModelShape(
    weight_bytes=96_576_768,
    keys_per_token=30 * 3 * 64,
    values_per_token=30 * 3 * 64,
    layers=30,
    heads=9,
    embedding_length=576,
    vocabulary=49_152,
)
ONE_SLOT = MemorySettings(context_tokens=8192)
EVERYTHING = KnownModel(
    name="llama-8b",
    learned_bytes=(400 * MEBIBYTE, 500 * MEBIBYTE, 450 * MEBIBYTE),
    manifest_bytes=600 * MEBIBYTE,
    shape=SMOLLM2,
    file_bytes=100 * MEBIBYTE,
    file_kind=FileKind.GGUF,
)


def test_most_reliable_estimate_source_is_used() -> None:
    model, sources = EVERYTHING, []
    without: dict[str, Any]
    for without in ({}, {"learned_bytes": ()}, {"manifest_bytes": None}, {"shape": None}, {"file_bytes": 0}):
        model = replace(model, **without)
        estimate = present(estimate_memory(model, ONE_SLOT))
        assert estimate.bytes == sum(part.bytes for part in estimate.parts)
        sources.append(estimate.source)
    assert sources == list(EstimateSource)
    assert estimate_memory(replace(model, name="qwen"), ONE_SLOT) is None


def test_learned_estimate_is_the_largest_load_plus_a_margin() -> None:
    estimate = present(estimate_memory(EVERYTHING, ONE_SLOT))
    assert estimate.bytes == 525 * MEBIBYTE


@pytest.mark.parametrize(("kind", "expected"), [(FileKind.GGUF, 1100), (FileKind.SAFETENSORS, 1300), (None, 1300)])
def test_file_size_is_weighted_by_its_type(kind: FileKind | None, expected: int) -> None:
    model = KnownModel(name="x", file_bytes=1000 * MEBIBYTE, file_kind=kind)
    estimate = present(estimate_memory(model, ONE_SLOT))
    assert (estimate.bytes, estimate.source) == (expected * MEBIBYTE, EstimateSource.FILE_SIZE)


def test_smollm2_context_estimate_matches_llama_cpp() -> None:
    """Measured with llama-server 0.5.0: 180.00 MiB as f16, 95.62 MiB as q8_0, for 8,192 tokens."""
    assert context_bytes(SMOLLM2, ONE_SLOT) == 180 * MEBIBYTE
    quantized = replace(ONE_SLOT, cache_type_k="q8_0", cache_type_v="q8_0")
    assert context_bytes(SMOLLM2, quantized) / MEBIBYTE == pytest.approx(95.62, abs=0.01)
    assert context_bytes(SMOLLM2, replace(ONE_SLOT, context_tokens=2048, slots=4)) == 180 * MEBIBYTE


@pytest.mark.parametrize(
    ("settings", "measured_mib"),
    [
        (ONE_SLOT, 105.14),
        (replace(ONE_SLOT, ubatch_tokens=128), 26.29),
        (replace(ONE_SLOT, flash_attention=False), 166.39),
    ],
)
def test_compute_estimate_is_an_upper_bound_of_the_llama_cpp_reservation(
    settings: MemorySettings, measured_mib: float
) -> None:
    estimated = compute_bytes(SMOLLM2, settings) / MEBIBYTE
    assert measured_mib <= estimated < 1.2 * measured_mib


def test_layers_kept_off_the_devices_use_no_device_memory() -> None:
    all_layers = estimate_shape(SMOLLM2, ONE_SLOT)
    none = estimate_shape(SMOLLM2, replace(ONE_SLOT, gpu_layers=0))
    half = estimate_shape(SMOLLM2, replace(ONE_SLOT, gpu_layers=15))
    assert {part.name: part.bytes for part in none.parts} == {"weights": 0, "context": 0, "compute": 0}
    assert none.bytes < half.bytes < all_layers.bytes
    assert estimate_shape(SMOLLM2, replace(ONE_SLOT, gpu_layers=999)) == all_layers


def test_unknown_cache_type_counts_as_the_largest() -> None:
    assert context_bytes(SMOLLM2, replace(ONE_SLOT, cache_type_k="x", cache_type_v="y")) == 360 * MEBIBYTE


SETTINGS = st.builds(
    MemorySettings,
    context_tokens=st.integers(1, 131_072),
    slots=st.integers(1, 16),
    cache_type_k=st.sampled_from(sorted(CACHE_TYPE_BYTES)),
    cache_type_v=st.sampled_from(sorted(CACHE_TYPE_BYTES)),
    ubatch_tokens=st.integers(1, 4096),
    flash_attention=st.booleans(),
    gpu_layers=st.integers(-1, 40),
)


@given(settings=SETTINGS, budget=st.integers(0, 64 * GIBIBYTE))
def test_largest_context_fits_and_the_next_one_does_not(settings: MemorySettings, budget: int) -> None:
    longest = largest_context(KnownModel(name="m", shape=SMOLLM2), settings, budget)
    assert longest % CONTEXT_STEP == 0
    if longest:
        assert estimate_shape(SMOLLM2, replace(settings, context_tokens=longest)).bytes <= budget
    longer = replace(settings, context_tokens=longest + CONTEXT_STEP)
    assert estimate_shape(SMOLLM2, longer).bytes > budget or longest >= 16_777_216


@given(settings=SETTINGS)
def test_larger_settings_never_need_less_memory(settings: MemorySettings) -> None:
    usual = estimate_shape(SMOLLM2, settings).bytes
    more: dict[str, Any]
    for more in (
        {"context_tokens": settings.context_tokens + 1},
        {"slots": settings.slots + 1},
        {"cache_type_k": "f32"},
        {"ubatch_tokens": settings.ubatch_tokens + 1},
        {"gpu_layers": -1},
        {"flash_attention": False},
    ):
        assert estimate_shape(SMOLLM2, replace(settings, **more)).bytes >= usual


@pytest.mark.parametrize(
    ("name", "billion_bytes"),
    [
        ("llama-7b", 14.0),
        ("Llama-3.1-70B-Q4_K_M", 43.75),
        ("mixtral-8x7b", 112.0),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", 0.135 * 5.2 / 8),
        ("qwen2.5-0.5b-instruct-q8_0", 0.53125),
        ("Qwen3-30B-A3B-Q5_K_S", 30 * 5.6 / 8),
        ("kimi-1t", 2000.0),
        ("gpt-oss-20b-mxfp4", 10.75),
        ("llama-8B-AWQ-INT4", 4.5),
    ],
)
def test_size_is_derived_from_names(name: str, billion_bytes: float) -> None:
    weights = present(weights_from_name(name))
    assert weights == pytest.approx(billion_bytes * 1e9)


@pytest.mark.parametrize("name", ["", "qwen", "gpt-4", "v2b1", "model-0b", "abc7bdef", "9999t", "q8_0", "7"])
def test_names_without_a_size_give_no_estimate(name: str) -> None:
    assert weights_from_name(name) is None


@given(st.text(max_size=2 * MAX_NAME_CHARS))
def test_any_name_can_be_parsed(name: str) -> None:
    assert (weights_from_name(name) or 1) > 0
    assert names_gguf(name) in {True, False}


def test_quantized_name_is_estimated_like_a_gguf_file() -> None:
    plain, quantized = (estimate_memory(KnownModel(name=name), ONE_SLOT) for name in ("llama-7b", "llama-7b-Q8_0"))
    assert plain is not None
    assert quantized is not None
    assert plain.bytes == pytest.approx(14e9 * 1.3, rel=0.001)
    assert quantized.bytes == pytest.approx(7e9 * 8.5 / 8 * 1.1, rel=0.001)


def test_memory_settings_follow_the_load_options() -> None:
    parameters: dict[str, int | float | str | bool] = {
        "context_tokens": 512,
        "slots": 2,
        "cache_type_k": "q8_0",
        "gpu_layers": 3,
        "flash_attention": "off",
        "batch_tokens": 64,
    }
    assert settings_for(2048, 4, parameters) == MemorySettings(
        context_tokens=512,
        slots=2,
        cache_type_k="q8_0",
        ubatch_tokens=64,
        flash_attention=False,
        gpu_layers=3,
    )
    assert settings_for(2048, 4, {}) == MemorySettings(context_tokens=2048, slots=4)
    assert settings_for(2048, 4, {"batch_tokens": 4096}).ubatch_tokens == 512
    in_process = settings_for(2048, 1, {"batch_tokens": 4096}, LLAMA_CPP_PYTHON.habits)
    assert (in_process.ubatch_tokens, in_process.flash_attention) == (4096, False)


def test_demo_model_is_estimated_from_its_header() -> None:
    facts = read_model_facts(demo_model_path())
    assert facts.shape == SMOLLM2
    assert (facts.context_tokens, facts.quantization, facts.file_kind) == (8192, "q4_1", FileKind.GGUF)


def test_sliding_window_does_not_reduce_the_estimate() -> None:
    """Gemma 3 270M: 18 layers of one head with 256 numbers; the window would need less, and this is an upper bound."""
    gemma = GgufHeader(
        weight_bytes=1, layers=18, kv_heads=(1,) * 18, key_length=256, value_length=256, sliding_window=512
    )
    shape = present(gemma.shape)
    assert context_bytes(shape, MemorySettings(context_tokens=1024)) == 18_432 * 1024


@pytest.mark.parametrize("missing", ["weight_bytes", "layers", "key_length", "value_length"])
def test_incomplete_header_gives_no_shape(missing: str) -> None:
    whole = GgufHeader(weight_bytes=1, layers=1, kv_heads=(1,), key_length=64, value_length=64)
    assert whole.shape is not None
    changes: dict[str, Any] = {missing: 0}
    assert replace(whole, **changes).shape is None
    assert replace(whole, kv_heads=()).shape is None


def test_broken_or_missing_files_give_all_available_facts(tmp_path: Path) -> None:
    broken = tmp_path / "m.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 96)
    facts = read_model_facts(broken)
    assert (facts.file_bytes, facts.file_kind, facts.shape) == (100, FileKind.GGUF, None)
    other = tmp_path / "m.bin"
    other.write_bytes(b"x" * 10)
    assert read_model_facts(other) == ModelFacts(file_bytes=10)
    assert read_model_facts(tmp_path / "nothing") == ModelFacts()
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    assert read_model_facts(tmp_path).file_kind is FileKind.SAFETENSORS


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(b"x" * MEBIBYTE)
    estimator = MemoryEstimator()
    first = estimator.estimate("m", ModelFiles(path=path), ONE_SLOT)
    path.write_bytes(b"x" * 10 * MEBIBYTE)
    second = estimator.estimate("m", ModelFiles(path=path), ONE_SLOT)
    assert first is not None
    assert second is not None
    assert (first.bytes, second.bytes) == (2 * MEBIBYTE, 13 * MEBIBYTE)
    assert estimator.estimate("m", None, ONE_SLOT) is None
    assert estimator.estimate("m", ModelFiles(path=tmp_path / "nothing"), ONE_SLOT) is None
