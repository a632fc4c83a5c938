"""The runtime diffusers: pipelines of images in a child process, one per model (docs/decisions/0011)."""

from typing import TYPE_CHECKING

from runner_svc.environments.diffusers.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.diffusers.parameters import PARAMETERS
from runner_svc.runtimes.diffusers.settings import DiffusersModel
from runner_svc.runtimes.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue


def _load_values(model: DiffusersModel) -> "Mapping[str, LoadValue]":
    # On a processor no layer is on a device.
    return {"gpu_layers": 0} if model.device == "cpu" else {}


def _check(model: DiffusersModel, context: "ModelContext") -> None:
    """Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    if model.slots != 1:
        raise context.refuse("slots", "must be 1: a pipeline works on one request at a time")
    if model.device_map != "none" and model.cpu_offload != "none":
        raise context.refuse("device_map", "cannot go with cpu_offload; leave one of them out")
    if model.default_steps is not None and model.default_steps > model.max_steps:
        raise context.refuse("default_steps", f"must be at most max_steps, {model.max_steps}")
    for name in ("device_map", "cpu_offload", "quantization"):
        if model.device == "cpu" and getattr(model, name) != "none":
            raise context.refuse(name, "is for accelerators, and device is cpu; leave it out")


def _build(model: DiffusersModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.memory.estimate import ForecastModel, ModelFiles, manifest_bytes_of  # noqa: PLC0415
    from runner_svc.runtimes.diffusers.backend import OPERATIONS, DiffusersBackend  # noqa: PLC0415
    from runner_svc.runtimes.diffusers.forecast import DiffusersForecast  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import media_engine  # noqa: PLC0415

    _check(model, context)
    engine = media_engine(
        model,
        context,
        lambda: DiffusersBackend(model, context),
        operations=OPERATIONS,
        habits=RUNTIME.habits,
    )
    forecast = ForecastModel(
        name=model.name,
        files=ModelFiles(path=model.file),
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters=_load_values(model),
        habits=RUNTIME.habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    return replace(engine, forecast=DiffusersForecast(forecast, context.estimator, model))


RUNTIME = Runtime(
    name="diffusers",
    summary="diffusers in a process that weft starts: images by Stable Diffusion and FLUX",
    docs="docs/engines.md",
    settings=DiffusersModel,
    build=_build,
    formats=frozenset({WeightFormat.PIPELINE}),
    places=EnginePlaces(in_layers=False),
    parameters=PARAMETERS,
    load_values=_load_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "the library's operations are fixed",
        "compute_type": "`dtype` is the type of the numbers",
        "embeddings": "a pipeline gives none",
    },
)
