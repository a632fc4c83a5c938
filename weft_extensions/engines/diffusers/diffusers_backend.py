"""Backend of the runtime diffusers: a server program around the library, started by the runner."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import get_args

from typing_extensions import override

from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator
from runner_svc.model_files.pipeline_folder import PipelineFolderError, read_pipeline_folder
from runner_svc.policy.load_options import LoadPlan, word_parameter
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate, MemoryPart, MemorySettings
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, file_engine, forecast_model
from weft.kernel.models.load_parameters import LoadParameter, LoadValue
from weft.kernel.requests.capabilities import UNKNOWN
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.diffusers.runtime import (
    RUNTIME,
    CpuOffload,
    DiffusersModel,
    Dtype,
    Quantization,
)
from weft_extensions.engines.library_server import MediaServer


def placement_of(model: DiffusersModel, parameters: Mapping[str, LoadValue]) -> dict[str, str]:
    """Returns the load parameters of a load, with the configured values as defaults."""
    configured = {"dtype": model.dtype, "cpu_offload": model.cpu_offload, "quantization": model.quantization}
    return {name: str(parameters.get(name, value)) for name, value in configured.items()}


QUANTIZED_SHARES: Mapping[str, float] = MappingProxyType(
    {"none": 1.0, "bitsandbytes_4bit": 0.4, "bitsandbytes_8bit": 0.6}
)
"""Memory per byte of 16-bit weights, including parts that are not quantized."""
SEQUENTIAL_SHARE = 0.15
"""Share of the weights on a device with `sequential` offloading: the largest layers and what computes."""


class DiffusersForecast(FileForecast):
    """Memory forecast of a pipeline in a folder."""

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
        # There is no KV cache: its type fields distinguish loads with different measurements.
        placement = placement_of(self._of_model, plan.parameters)
        settings = super()._settings(plan)
        return replace(
            settings,
            cache_type_k=f"{placement['cpu_offload']} {self._of_model.device_map}",
            cache_type_v=f"{placement['quantization']} {placement['dtype']}",
        )

    def _share(self, plan: LoadPlan) -> float:
        """Returns the maximum share of the weights on devices at any time."""
        placement = placement_of(self._of_model, plan.parameters)
        offload = placement["cpu_offload"]
        if offload == "sequential":
            return SEQUENTIAL_SHARE
        share = QUANTIZED_SHARES[placement["quantization"]]
        if offload == "none":
            return share
        try:
            folder = read_pipeline_folder(self._of_model.file)
        except (PipelineFolderError, OSError):
            return share
        return share * max(folder.sizes.values()) / max(1, folder.weight_bytes)


OPERATIONS = frozenset({Operation.IMAGE})


class DiffusersBackend(MediaServer[DiffusersModel]):
    """Backend of one server process."""

    runtime = RUNTIME
    operations = OPERATIONS
    noun = "diffusers"
    missing_library = "diffusers and PyTorch cannot be loaded; run: weft runtime install diffusers"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return (
            word_parameter("dtype", "Data type.", get_args(Dtype)),
            word_parameter("cpu_offload", "What is kept in main memory while it is not in use.", get_args(CpuOffload)),
            word_parameter("quantization", "Quantization of the weights when they are loaded.", get_args(Quantization)),
        )


def _check(model: DiffusersModel, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    if model.slots != 1:
        raise context.refuse("slots", "must be 1: a pipeline works on one request at a time")
    if model.device_map != "none" and model.cpu_offload != "none":
        raise context.refuse("device_map", "cannot be combined with cpu_offload; omit one of them")
    for name in ("device_map", "cpu_offload", "quantization"):
        if model.device == "cpu" and getattr(model, name) != "none":
            raise context.refuse(name, "needs an accelerator, but device is cpu; omit it")


def build(model: DiffusersModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    _check(model, context)
    return file_engine(
        model,
        context,
        DiffusersBackend,
        DiffusersForecast(forecast_model(model, RUNTIME.habits, model.device_values), context.estimator, model),
        operations=OPERATIONS,
        capabilities=lambda _: UNKNOWN,
    )
