"""Chooses an engine for a model that is requested by source, by the format of its weights. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

CONFIGURATION = "config.json"
_SAFETENSORS = ".safetensors"
_CTRANSLATE2_WEIGHTS = "model.bin"
_PIPELINE_INDEX = "model_index.json"
_QUANTIZATION = "quantization_config"
_METHOD = "quant_method"
_OF_WHISPER = frozenset({"alignment_heads", "lang_ids", "suppress_ids_begin"})
"""Keys in the `config.json` of CTranslate2 that only Whisper models have."""


class WeightFormat(StrEnum):
    """The format of a model's weights; each engine loads some of them."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    EXL3 = "exl3"
    """Safetensors quantized by ExLlamaV3."""
    CTRANSLATE2 = "ct2"
    WHISPER = "whisper"
    """A Whisper model converted for CTranslate2."""
    PIPELINE = "pipeline"
    """Safetensors of several cooperating models, in a folder with an index."""


_WORDS: Mapping[WeightFormat, str] = {
    WeightFormat.GGUF: "a GGUF file",
    WeightFormat.SAFETENSORS: "a folder of safetensors",
    WeightFormat.EXL3: "a folder quantized by ExLlamaV3",
    WeightFormat.CTRANSLATE2: "a folder of CTranslate2",
    WeightFormat.WHISPER: "a folder of a Whisper model",
    WeightFormat.PIPELINE: "a pipeline of diffusers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCandidate:
    """A runtime on this machine."""

    name: str
    formats: frozenset[WeightFormat]
    remedy: str = ""
    """The command that installs it; empty: it is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """The selected runtime."""

    name: str
    reason: str
    """A sentence for people."""


def folder_format(names: Iterable[str], configuration: Mapping[str, object]) -> WeightFormat:
    """Returns the weight format of a folder, from its file names and its `config.json`.

    Raises UNSUPPORTED_OPERATION if no engine can load them.
    """
    known = frozenset(names)
    if _PIPELINE_INDEX in known:
        return WeightFormat.PIPELINE
    if _CTRANSLATE2_WEIGHTS in known and not any(name.endswith(_SAFETENSORS) for name in known):
        return WeightFormat.WHISPER if _OF_WHISPER & configuration.keys() else WeightFormat.CTRANSLATE2
    if any(name.endswith(_SAFETENSORS) for name in known):
        quantization = configuration.get(_QUANTIZATION)
        is_exl3 = isinstance(quantization, Mapping) and quantization.get(_METHOD) == WeightFormat.EXL3.value
        return WeightFormat.EXL3 if is_exl3 else WeightFormat.SAFETENSORS
    raise WeftError(Reason.UNSUPPORTED_OPERATION, "the folder has no supported weights: GGUF, safetensors or model.bin")


def choose_engine(weights: WeightFormat, own: str, candidates: Sequence[EngineCandidate]) -> EngineChoice:
    """Returns the runtime for weights of this format: the runner's own if it supports it, else the first installed.

    Raises UNSUPPORTED_OPERATION with the commands that install a suitable one.
    """
    able = sorted(
        (each for each in candidates if weights in each.formats), key=lambda each: (each.name != own, each.name)
    )
    chosen = next((each for each in able if not each.remedy), None)
    if chosen is None:
        commands = " or: ".join(dict.fromkeys(each.remedy for each in able)) or "no runtime of this release loads it"
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            f"the model is {_WORDS[weights]}, and no engine for it is installed; run: {commands}"
            if able
            else f"the model is {_WORDS[weights]}, and no runtime of this release loads it",
        )
    whose = "the runner's own runtime" if chosen.name == own else "which is installed here"
    return EngineChoice(name=chosen.name, reason=f"{chosen.name} serves it, {whose}: it is {_WORDS[weights]}")
