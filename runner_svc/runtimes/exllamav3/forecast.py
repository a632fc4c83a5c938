"""The forecast of the memory that a load of ExLlamaV3 takes: its weights, and a cache for all requests together."""

from typing_extensions import override

from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator
from runner_svc.policy.load_plan import LoadPlan
from runner_svc.policy.memory_estimate import MemorySettings
from runner_svc.runtimes.exllamav3.settings import ExllamaV3Model, cache_bits, cache_tokens_of

_CACHE_TYPES = ((4, "q4_0"), (5, "q5_0"), (8, "q8_0"), (16, "f16"))
"""The estimator's names of types with at least so many bits; each has two bytes per 32 numbers more, as here."""


class ExllamaV3Forecast(FileForecast):
    """The forecast of a model whose cache has a size of its own, instead of one per request."""

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
            ubatch_tokens=model.chunk_tokens,
        )


def _cache_type(bits: int) -> str:
    return next(name for least, name in _CACHE_TYPES if bits <= least)
