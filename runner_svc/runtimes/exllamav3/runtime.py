"""The runtime exllamav3: the library in a child process of its own, one per model (docs/decisions/0011)."""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from runner_svc.environments.exllamav3.environment import ENVIRONMENT
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import EnginePlaces
from runner_svc.runtimes.exllamav3.parameters import PARAMETERS
from runner_svc.runtimes.exllamav3.settings import PAGE_TOKENS, ExllamaV3Model, cache_tokens_of
from runner_svc.runtimes.runtime import Requirement, Runtime
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine

COMPILER_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
USUAL_FOLDER = Path("/usr/local/cuda")
DRIVER_SECONDS = 5.0
"""Time for the driver to name its cards."""


def _find(command: tuple[str, ...] | None) -> str:
    """Returns where CUDA's compiler is. Raises CONNECT_FAILED where there is none, or no card."""
    _require_card()
    if command:
        return f"up to the environment of {command[0]}"
    named = next((os.environ[name] for name in COMPILER_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        return named
    if found := shutil.which("nvcc"):
        return found
    if USUAL_FOLDER.is_dir():
        return str(USUAL_FOLDER)
    message = "no CUDA compiler: ExLlamaV3 compiles its kernels for the cards of this machine, and runs on CUDA only"
    raise WeftError(Reason.CONNECT_FAILED, message)


def _require_card() -> None:
    # Imported here: only `weft doctor` asks.
    from weft.gpu.nvml import read_within  # noqa: PLC0415

    reading = read_within(DRIVER_SECONDS)
    if reading is None or not reading.devices:
        raise WeftError(Reason.CONNECT_FAILED, "no NVIDIA card that answers: ExLlamaV3 runs on CUDA only")


def _check(model: ExllamaV3Model, context: "ModelContext") -> None:
    """Raises INVALID_ARGUMENT naming a setting that contradicts another."""
    if model.embeddings:
        raise context.refuse("embeddings", "must be false: ExLlamaV3 gives no embeddings of generating models")
    for name in ("chunk_tokens", "cache_tokens"):
        if (getattr(model, name) or 0) % PAGE_TOKENS:
            raise context.refuse(name, f"must be a multiple of {PAGE_TOKENS}")
    if cache_tokens_of(model.cache_tokens, model.slot_context_tokens, model.slots) <= model.slot_context_tokens:
        raise context.refuse("cache_tokens", f"must be above context_tokens, {model.slot_context_tokens}")
    if model.gpu_split and not any(model.gpu_split):
        raise context.refuse("gpu_split", "must have a device with memory")
    if model.loop_tokens and model.loop_repeats >= model.loop_tokens:
        raise context.refuse("loop_repeats", f"must be below loop_tokens, {model.loop_tokens}")


def _build(model: ExllamaV3Model, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from dataclasses import replace  # noqa: PLC0415

    from runner_svc.memory.estimate import ForecastModel, ModelFiles, manifest_bytes_of  # noqa: PLC0415
    from runner_svc.runtimes.exllamav3.backend import ExllamaV3Backend  # noqa: PLC0415
    from runner_svc.runtimes.exllamav3.forecast import ExllamaV3Forecast  # noqa: PLC0415
    from runner_svc.runtimes.exllamav3.settings import WEIGHTS_FILE  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import file_context, file_engine, text_abilities  # noqa: PLC0415

    _check(model, context)
    context = file_context(model, context, context.command)
    engine = file_engine(
        model,
        context,
        lambda: ExllamaV3Backend(model, context),
        operations=ExllamaV3Backend.always,
        habits=RUNTIME.habits,
        load_values={},
        abilities=text_abilities(context.templates),
    )
    forecast = ForecastModel(
        name=model.name,
        files=ModelFiles(path=model.file),
        quantizations=engine.quantizations,
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters={},
        habits=RUNTIME.habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    single = model.file / WEIGHTS_FILE
    return replace(
        engine,
        # The digest of one of several files would not tell the model.
        model_path=single if single.is_file() else None,
        forecast=ExllamaV3Forecast(forecast, context.estimator, model),
    )


RUNTIME = Runtime(
    name="exllamav3",
    summary="ExLlamaV3 in a process that weft starts, on CUDA devices",
    docs="docs/engines.md",
    settings=ExllamaV3Model,
    build=_build,
    formats=frozenset({WeightFormat.EXL3}),
    places=EnginePlaces(on_host=False, in_layers=False),
    parameters=PARAMETERS,
    requirement=Requirement(
        name="CUDA",
        find=_find,
        remedy="a machine with an NVIDIA card, and the CUDA toolkit with CUDA_HOME set to its folder",
    ),
    environment=ENVIRONMENT,
    advice={"operations": "the library's operations are fixed", "compute_type": "`cache_quant` is that of the cache"},
)
