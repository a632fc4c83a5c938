"""Backend of the runtime exllamav3: a server program around the library, started by the runner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from runner_svc.backend.port import CacheIsolation, LoadOrder
from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator, ModelFiles
from runner_svc.policy.load_options import LoadPlan, context_parameter, whole_parameter, word_parameter
from runner_svc.policy.memory_estimate import MemorySettings
from runner_svc.runtimes.flags import configured_values
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.load_parameters import LoadParameter, LoadValue
from weft_extensions.engines.exllamav3.runtime import (
    FULL_BITS,
    PAGE_TOKENS,
    RUNTIME,
    WEIGHTS_FILE,
    ExllamaV3Model,
    cache_bits,
    cache_tokens_of,
)
from weft_extensions.engines.text_server import TextServer

CHUNK_TOKENS = 2048
"""Number of prompt tokens that the server processes per batch, unless `--chunk-tokens` is set."""
MAX_CHUNK_TOKENS = 1_048_576
QUANT_WORDS = (*map(str, range(2, 9)), str(FULL_BITS))


_CACHE_TYPES = ((4, "q4_0"), (5, "q5_0"), (8, "q8_0"), (16, "f16"))
"""The estimator's types with at least this many bits; like the library's, each uses two more bytes per 32 numbers."""


class ExllamaV3Forecast(FileForecast):
    """Memory forecast of a model with one cache for all requests."""

    def __init__(self, forecast: ForecastModel, estimator: MemoryEstimator, model: ExllamaV3Model) -> None:
        super().__init__(forecast, estimator)
        self._of_model = model

    @override
    def _settings(self, plan: LoadPlan) -> MemorySettings:
        settings, model, given = super()._settings(plan), self._of_model, plan.parameters
        wanted = int(given["cache_tokens"]) if "cache_tokens" in given else model.cache_tokens
        tokens = cache_tokens_of(wanted, settings.context_tokens, model.slots)
        keys, values = cache_bits(str(given["cache_quant"]) if "cache_quant" in given else model.cache_quant)
        return MemorySettings(
            context_tokens=-(-tokens // settings.slots),
            slots=settings.slots,
            cache_type_k=_cache_type(keys),
            cache_type_v=_cache_type(values),
            ubatch_tokens=_chunk_tokens(model.extra_arguments),
        )


def _chunk_tokens(extra_arguments: Sequence[str]) -> int:
    parameter = whole_parameter("chunk_tokens", "", 1, MAX_CHUNK_TOKENS, CHUNK_TOKENS)
    given = configured_values(extra_arguments, ((parameter, ("--chunk-tokens",)),))
    return int(given.get(parameter.name, CHUNK_TOKENS))


def _cache_type(bits: int) -> str:
    return next(name for least, name in _CACHE_TYPES if bits <= least)


class ExllamaV3Backend(TextServer[ExllamaV3Model]):
    """Backend of one server process."""

    runtime = RUNTIME
    missing_library = (
        "ExLlamaV3 cannot be loaded; it needs a CUDA device, CUDA's compiler (CUDA_HOME) and its environment: "
        "weft runtime install exllamav3"
    )
    noun = "ExLlamaV3"
    cache_isolation = CacheIsolation.SALT

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        model, words = self.model, "Tokens of the cache, for all requests together; a multiple of 256."
        return (
            context_parameter(model.slot_context_tokens, self.context.trained_context_tokens),
            whole_parameter("cache_tokens", words, PAGE_TOKENS, 16_777_216, model.cache_tokens),
            word_parameter("cache_quant", "Bits of keys and values in the cache.", QUANT_WORDS),
        )

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        if int(parameters.get("cache_tokens", 0)) % PAGE_TOKENS:
            raise invalid_field(f"{field}.cache_tokens", f"must be a multiple of {PAGE_TOKENS}")

    @override
    def own_arguments(self, order: LoadOrder) -> list[str]:
        model, given = self.model, order.parameters
        keys, values = cache_bits(str(given["cache_quant"]) if "cache_quant" in given else model.cache_quant)
        wanted = int(given["cache_tokens"]) if "cache_tokens" in given else model.cache_tokens
        context = int(given.get("context_tokens", model.slot_context_tokens))
        return [
            *super().own_arguments(order),
            *("--cache-tokens", str(cache_tokens_of(wanted, context, model.slots))),
            *("--key-bits", str(keys), "--value-bits", str(values)),
        ]


def _check(model: ExllamaV3Model, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    if (model.cache_tokens or 0) % PAGE_TOKENS:
        raise context.refuse("cache_tokens", f"must be a multiple of {PAGE_TOKENS}")
    if cache_tokens_of(model.cache_tokens, model.slot_context_tokens, model.slots) <= model.slot_context_tokens:
        raise context.refuse("cache_tokens", f"must be above context_tokens, {model.slot_context_tokens}")
    if model.gpu_split and not any(model.gpu_split):
        raise context.refuse("gpu_split", "must have a device with memory")


def build(model: ExllamaV3Model, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    _check(model, context)
    # The headers of all files in a folder contain the model's shape.
    folders = {name: path.expanduser() for name, path in model.quantizations.items()}
    described = replace(forecast_model(model, RUNTIME.habits), files=ModelFiles(path=model.file), quantizations=folders)
    engine = file_engine(
        model,
        context,
        ExllamaV3Backend,
        ExllamaV3Forecast(described, context.estimator, model),
        operations=ExllamaV3Backend.operations,
    )
    single = model.file / WEIGHTS_FILE
    # The digest of one of several files would not identify the model.
    return replace(engine, model_path=single if single.is_file() else None)
