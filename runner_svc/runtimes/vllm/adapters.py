"""Checks of the adapters of a model before vLLM is started with them."""

from pathlib import Path

import msgspec

from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.vllm.settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, VllmAdapter, VllmModel

MAX_CONFIG_BYTES = 1024 * 1024
_LOCAL = ("/", "~", ".")
"""How a path begins that is no id of the hub."""


class _Config(msgspec.Struct):
    r: int


def check_adapters(model: VllmModel, context: ModelContext) -> None:
    """Raise INVALID_ARGUMENT naming the setting for adapters that vLLM could not load."""
    if not model.adapters:
        return
    if model.kind != "generation":
        raise context.refuse("adapters", f"are for models of kind generation, not {model.kind}")
    if model.lora_path is not None:
        raise context.refuse("lora_path", "answers every request with one adapter; leave it out beside adapters")
    for index, adapter in enumerate(model.adapters):
        fault = _fault(adapter)
        if fault is not None:
            raise context.refuse(f"adapters[{index}].path", fault)
        rank = 0 if adapter.folder is None else _rank(adapter.folder)
        if rank > model.max_lora_rank:
            message = f"is {model.max_lora_rank}, and adapter {adapter.name} has a rank of {rank}"
            raise context.refuse("max_lora_rank", message)


def _fault(adapter: VllmAdapter) -> str | None:
    """Returns why an adapter cannot be loaded; None: nothing is known."""
    folder = adapter.folder
    if folder is None:
        return f"there is no folder {adapter.path}" if adapter.path.startswith(_LOCAL) else None
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            return f"is no adapter as PEFT writes it, because it has no {name}: {folder}"
    if not _rank(folder):
        return f"{ADAPTER_CONFIG} names no rank `r` of a LoRA: {folder}"
    return None


def _rank(folder: Path) -> int:
    """Returns the rank of an adapter by its configuration; 0: it names none, or cannot be read."""
    try:
        with (folder / ADAPTER_CONFIG).open("rb") as file:
            return max(0, msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_Config).r)
    except (OSError, msgspec.DecodeError):
        return 0
