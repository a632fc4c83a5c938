"""Which engine serves a model that is asked for by its source."""

from collections.abc import Mapping

import pytest
from kit.failures import fails

from runner_svc.policy.engine_choice import EngineCandidate, WeightFormat, choose_engine, folder_format
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def _engine(name: str, weights: WeightFormat, remedy: str = "") -> EngineCandidate:
    return EngineCandidate(name=name, formats=frozenset({weights}), remedy=remedy)


@pytest.mark.parametrize(
    ("names", "configuration", "weights"),
    [
        (["config.json", "model.safetensors"], {}, WeightFormat.SAFETENSORS),
        (["a.safetensors"], {"quantization_config": {"quant_method": "awq"}}, WeightFormat.SAFETENSORS),
        (["a.safetensors"], {"quantization_config": {"quant_method": "exl3"}}, WeightFormat.EXL3),
        (["model.bin", "config.json"], {}, WeightFormat.CTRANSLATE2),
        (["model.bin", "config.json"], {"alignment_heads": [[1, 0]], "suppress_ids": []}, WeightFormat.WHISPER),
        (["model_index.json", "whole.safetensors"], {}, WeightFormat.PIPELINE),
        (["model.bin", "a.safetensors"], {"quantization_config": "odd"}, WeightFormat.SAFETENSORS),
    ],
)
def test_weight_format_of_a_folder_is_detected(
    names: list[str], configuration: Mapping[str, object], weights: WeightFormat
) -> None:
    assert folder_format(names, configuration) is weights


def test_folder_without_weights_is_refused() -> None:
    with fails(Reason.UNSUPPORTED_OPERATION, match="no supported weights"):
        folder_format(["pytorch_model.bin", "config.json"], {})


def test_runtime_of_the_runner_is_preferred_and_reported() -> None:
    candidates = [_engine("a", WeightFormat.GGUF), _engine("own", WeightFormat.GGUF)]
    choice = choose_engine(WeightFormat.GGUF, "own", candidates)
    assert choice.name == "own"
    assert "own runtime" in choice.reason


def test_another_installed_engine_serves_formats_the_own_one_cannot_load() -> None:
    candidates = [
        _engine("own", WeightFormat.GGUF),
        _engine("absent", WeightFormat.SAFETENSORS, "weft runtime install absent"),
        _engine("there", WeightFormat.SAFETENSORS),
    ]
    assert choose_engine(WeightFormat.SAFETENSORS, "own", candidates).name == "there"


def test_refusal_without_an_installed_engine_shows_the_install_command() -> None:
    candidates = [
        _engine("own", WeightFormat.GGUF),
        _engine("x", WeightFormat.SAFETENSORS, "weft runtime install x"),
        _engine("x_too", WeightFormat.SAFETENSORS, "weft runtime install x"),
    ]
    with fails(Reason.UNSUPPORTED_OPERATION, match=r"run: weft runtime install x$"):
        choose_engine(WeightFormat.SAFETENSORS, "own", candidates)


def test_format_that_no_runtime_loads_is_refused() -> None:
    with pytest.raises(WeftError, match="no runtime of this release"):
        choose_engine(WeightFormat.EXL3, "own", [_engine("own", WeightFormat.GGUF)])
