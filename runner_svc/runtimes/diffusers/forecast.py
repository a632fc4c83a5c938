"""The forecast of the memory that a load of diffusers takes: all weights of the folder, less what is offloaded.

What loads took is learned per files and settings, as of every model in files.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from typing_extensions import override

from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator
from runner_svc.model_files.pipeline_folder import PipelineFolderError, read_pipeline_folder
from runner_svc.policy.load_plan import LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate, MemoryPart, MemorySettings
from runner_svc.runtimes.diffusers.arguments import placement_of
from runner_svc.runtimes.diffusers.settings import DiffusersModel

QUANTIZED_SHARES: Mapping[str, float] = MappingProxyType(
    {"none": 1.0, "bitsandbytes_4bit": 0.4, "bitsandbytes_8bit": 0.6}
)
"""Memory per byte of 16-bit weights, with what is not quantized."""
SEQUENTIAL_SHARE = 0.15
"""Share of the weights that is on a device at once with `sequential`: the largest layers, and what computes."""


class DiffusersForecast(FileForecast):
    """The forecast of a pipeline in a folder."""

    def __init__(self, forecast: ForecastModel, estimator: MemoryEstimator, model: DiffusersModel) -> None:
        super().__init__(forecast, estimator)
        self._of_model = model

    @override
    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        estimate = await super().expect(plan)
        if estimate is None or estimate.source is not EstimateSource.FILE_SIZE:
            return estimate
        share = await asyncio.to_thread(self._share, plan)
        parts = tuple(MemoryPart(name=part.name, bytes=round(part.bytes * share)) for part in estimate.parts)
        return replace(estimate, bytes=sum(part.bytes for part in parts), parts=parts)

    @override
    def _settings(self, plan: LoadPlan) -> MemorySettings:
        # There is no cache: the fields of its types tell loads apart whose measurements differ.
        placement = placement_of(self._of_model, plan.parameters)
        settings = super()._settings(plan)
        return replace(
            settings,
            cache_type_k=f"{placement['cpu_offload']} {self._of_model.device_map}",
            cache_type_v=f"{placement['quantization']} {placement['dtype']}",
        )

    def _share(self, plan: LoadPlan) -> float:
        """Returns the share of the weights that devices hold at once."""
        placement = placement_of(self._of_model, plan.parameters)
        offload = placement["cpu_offload"]
        if offload == "sequential":
            return SEQUENTIAL_SHARE
        share = QUANTIZED_SHARES[placement["quantization"]]
        if offload == "none":
            return share
        try:
            folder = read_pipeline_folder(self._of_model.file, self._of_model.weights_variant)
        except (PipelineFolderError, OSError):
            return share
        return share * max(folder.sizes.values()) / max(1, folder.weight_bytes)
