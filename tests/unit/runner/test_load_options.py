"""Options of a load, and their validation."""

from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from instance_stage import StepBackend
from kit.engine_settings import engine_settings
from kit.failures import fails

from runner_svc.instance.load_messages import load_spec_from, options_message
from runner_svc.policy.load_options import STAY_LOADED, LoadPlan, LoadSpec
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from weft.api.runner.v1.load_pb2 import LoadOptions, LoadValue
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.load_parameters import load_parameter
from weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend import LlamaCppPythonBackend
from weft_extensions.engines.llama_cpp_python.runtime import LlamaCppPythonModel

VARIANTS = {"q8_0": Path("/models/q8.gguf")}


class _Backend(StepBackend):
    load_parameters = (
        load_parameter("context_tokens", "", integer=True, minimum=16, maximum=8192, default=2048),
        load_parameter("attention", "", words=("on", "off")),
        load_parameter("mlock", "", flag=True, default=False),
    )


def _wish(options: LoadOptions) -> LoadSpec:
    return load_spec_from(options, cast("Any", _Backend()), VARIANTS, "Q4_K_M")


def _options(name: str, value: LoadValue) -> LoadOptions:
    return LoadOptions(parameters={name: value})


def test_load_without_options_uses_the_configuration_and_stays() -> None:
    assert _wish(LoadOptions()) == STAY_LOADED


def test_option_equal_to_the_configuration_is_dropped() -> None:
    for options in (
        _options("context_tokens", LoadValue(integer=2048)),
        _options("mlock", LoadValue(flag=False)),
        LoadOptions(quantization="q4_k_m"),
    ):
        assert _wish(options).plan == LoadPlan()


def test_different_option_is_kept_and_round_trips() -> None:
    options = LoadOptions(
        parameters={"context_tokens": LoadValue(integer=4096), "attention": LoadValue(word="off")},
        quantization="q8_0",
        memory_budget_bytes=7,
        keep_alive=Duration(seconds=90),
        pin=True,
    )
    wish = _wish(options)
    assert wish.plan == LoadPlan(parameters={"context_tokens": 4096, "attention": "off"}, quantization="q8_0")
    assert (wish.memory_budget_bytes, wish.keep_alive_seconds, wish.pin) == (7, 90.0, True)
    told = options_message(wish.plan, wish.keep_alive_seconds, pin=wish.pin)
    options.ClearField("memory_budget_bytes")
    assert told == options


@pytest.mark.parametrize(("seconds", "kept"), [(0, 0.0), (-1, -1.0), (-9, -1.0), (366 * 86_400, 366 * 86_400.0)])
def test_keep_alive_may_be_up_to_a_year_or_unlimited(seconds: int, kept: float) -> None:
    assert _wish(LoadOptions(keep_alive=Duration(seconds=seconds))).keep_alive_seconds == kept


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (LoadOptions(keep_alive=Duration(seconds=366 * 86_400 + 1)), "options.keep_alive"),
        (LoadOptions(memory_budget_bytes=-1), "options.memory_budget_bytes"),
        (LoadOptions(memory_budget_bytes=2**51), "options.memory_budget_bytes"),
        (LoadOptions(quantization="q2_k"), "options.quantization"),
        (_options("context_tokens", LoadValue(integer=15)), "options.parameters.context_tokens"),
        (_options("context_tokens", LoadValue()), "options.parameters.context_tokens"),
        (_options("context_tokens", LoadValue(number=99.5)), "options.parameters.context_tokens"),
        (_options("attention", LoadValue(word="maybe")), "options.parameters.attention"),
        (_options("attention", LoadValue(flag=True)), "options.parameters.attention"),
        (_options("mlock", LoadValue(integer=1)), "options.parameters.mlock"),
        (_options("mlock", LoadValue()), "options.parameters.mlock"),
        (_options("layers", LoadValue(integer=1)), "options.parameters.layers"),
    ],
)
def test_invalid_option_error_names_it(options: LoadOptions, field: str) -> None:
    with fails(field=field):
        _wish(options)


def test_refused_variant_error_lists_the_available_ones() -> None:
    with pytest.raises(FieldError, match=r"declared: Q4_K_M, q8_0"):
        _wish(LoadOptions(quantization="q2_k"))


def _llama_server() -> LlamaServerBackend:
    return LlamaServerBackend(*engine_settings(LlamaServerModel, command=("llama-server",), path=Path("m.gguf")))


def _llama_cpp_python() -> LlamaCppPythonBackend:
    return LlamaCppPythonBackend(*engine_settings(LlamaCppPythonModel, path=Path("m.gguf")))


@pytest.mark.parametrize("make", [_llama_server, _llama_cpp_python])
def test_incompatible_options_are_refused_before_an_unload(make: Any) -> None:
    backend = make()
    together = {"cache_type_v": LoadValue(word="q8_0"), "flash_attention": LoadValue(word="off")}
    for options, field in (
        (LoadOptions(parameters=together), "options.parameters.cache_type_v"),
        (LoadOptions(parameters={"batch_tokens": LoadValue(integer=0)}), "options.parameters.batch_tokens"),
    ):
        with fails(field=field):
            load_spec_from(options, backend, {})
