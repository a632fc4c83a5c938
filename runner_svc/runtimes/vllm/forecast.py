"""The forecast of the memory that a load of vLLM takes: weights, KV cache and what it computes in."""

from collections.abc import Mapping

from typing_extensions import override

from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator
from runner_svc.policy.load_plan import LoadPlan
from runner_svc.policy.memory_estimate import CONTEXT_STEP, MemorySettings, ModelShape
from runner_svc.runtimes.vllm.arguments import bytes_per_token, cache_bytes_per_device, configured_parameters
from runner_svc.runtimes.vllm.settings import VllmModel

_CACHE_TYPES: Mapping[float, str] = {1.0: "q8_0", 2.0: "f16", 4.0: "f32"}
"""Names of the estimator's cache types by bytes per number; eight bits are a little more there."""


class VllmForecast(FileForecast):
    """The forecast of a model whose KV cache has a size of its own, instead of one per request."""

    def __init__(
        self, forecast: ForecastModel, estimator: MemoryEstimator, model: VllmModel, shape: ModelShape | None
    ) -> None:
        super().__init__(forecast, estimator)
        self._settings_of_model = model
        self._shape = shape

    @override
    def _settings(self, plan: LoadPlan) -> MemorySettings:
        settings, model, shape = super()._settings(plan), self._settings_of_model, self._shape
        if shape is None or not shape.keys_per_token:
            return settings
        values = {**configured_parameters(model), **plan.parameters}
        per_token = bytes_per_token(model, values, shape)
        kind = _CACHE_TYPES[per_token / (shape.keys_per_token + shape.values_per_token)]
        cache_bytes = cache_bytes_per_device(model, values, shape, devices=1)
        context = settings.context_tokens
        if cache_bytes is not None:
            devices = (model.tensor_parallel or 1) * (model.pipeline_parallel or 1)
            given = devices if "kv_cache_memory_bytes" in values else 1
            context = max(CONTEXT_STEP, int(given * cache_bytes / per_token / settings.slots))
        return MemorySettings(
            context_tokens=context,
            slots=settings.slots,
            cache_type_k=kind,
            cache_type_v=kind,
        )
