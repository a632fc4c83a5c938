"""What runtimes of models in files have in common: the files that a configuration names, and estimates from them."""

import os
from pathlib import Path
from typing import TypeVar

from runner_svc.memory.estimate import FileForecast, ForecastModel, manifest_bytes_of
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.settings import DEFAULT_CONTEXT_TOKENS, FileModelSettings

FileSettings = TypeVar("FileSettings", bound=FileModelSettings)


def quantization_files(model: FileModelSettings, context: ModelContext) -> dict[str, Path]:
    """Returns the further files of a model, by quantization. Raises INVALID_ARGUMENT naming one that does not exist."""
    paths = {name: path.expanduser() for name, path in model.quantizations.items()}
    for name, path in paths.items():
        if not path.is_file():
            raise context.refuse(f"quantizations.{name}", f"there is no file {path}")
    return paths


def template_file(model: FileModelSettings, context: ModelContext) -> Path | None:
    """Returns the chat template that replaces the model file's own. Raises INVALID_ARGUMENT when it does not exist."""
    path = None if model.chat_template_path is None else model.chat_template_path.expanduser()
    if path is not None and not path.is_file():
        raise context.refuse("chat_template_path", f"there is no file {path}")
    return path


def file_forecast(
    model: FileSettings, slots: int, runtime: Runtime[FileSettings], context: ModelContext
) -> FileForecast:
    """Returns the forecast of the memory that loads of a model take."""
    about = ForecastModel(
        name=model.name,
        path=model.path.expanduser(),
        quantizations={name: variant.expanduser() for name, variant in model.quantizations.items()},
        context_tokens=model.context_tokens or DEFAULT_CONTEXT_TOKENS,
        slots=slots,
        parameters=runtime.load_values(model),
        habits=runtime.habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    return FileForecast(about, context.estimator)


def default_threads() -> int:
    """Cores minus one: llama.cpp on every core of a shared machine is many times slower (measured)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, cores - 1)
