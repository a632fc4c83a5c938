"""Model sizes: context, slots and placement, chosen by model files and the machine's memory."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner_svc.memory.estimate import ModelFiles, loaded_facts
from runner_svc.memory.lease_manager import DEFAULT_MARGIN_BYTES
from runner_svc.memory.machine_memory import host_memory_bytes
from runner_svc.model_store.found import FoundFiles, ProgramFolders, locate
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.model_sizing import AskedSize, DeviceMemory, Location, MachineMemory, SizedModel, choose_size
from runner_svc.runtimes.runtime import Runtime
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import (
    HubSource,
    LmStudioSource,
    ModelSource,
    OllamaSource,
    PathSource,
    parse_source,
    shown_source,
)
from weft_app.compose.accelerators import host_observer
from weft_app.compose.demo import DEMO_RUNNER
from weft_app.config.config import AcceleratorSettings
from weft_app.config.document import Document
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

CONTEXT_TOKENS, SLOTS = "context_tokens", "slots"
"""Load parameters that request a size."""
GPU_LAYERS_FLAG = "--gpu-layers"


async def size_by_memory(
    source: ModelSource,
    files: FoundFiles,
    runtime: Runtime[Any],
    memory: MachineMemory,
    options: load_pb2.LoadOptions | None = None,
) -> tuple[added_model_pb2.ModelSizing, tuple[str, ...]]:
    """Returns the size that `policy/model_sizing.py` chooses, and the reasons as short sentences.

    `options` are the requested load options. Raises INSUFFICIENT_MEMORY if the model fits nowhere.
    """
    facts = await asyncio.to_thread(loaded_facts, ModelFiles(path=files.path, projector=files.projector))
    model = SizedModel(
        known=replace(facts, name=shown_source(source)),
        trained_context_tokens=facts.context_tokens,
        habits=runtime.habits,
        locations=runtime.locations,
    )
    chosen = choose_size(model, memory, asked_size(options or load_pb2.LoadOptions()))
    sizing = added_model_pb2.ModelSizing(context_tokens=chosen.context_tokens, slots=chosen.slots)
    # Layers only if the engine would place them differently.
    if chosen.location is Location.SPLIT or (chosen.location is Location.HOST and memory.devices):
        sizing.gpu_layers = chosen.gpu_layers
    return sizing, chosen.reasons


def asked_size(options: load_pb2.LoadOptions) -> AskedSize:
    """Returns the requested size; the load checks other parameters."""
    return AskedSize(context_tokens=_positive(options, CONTEXT_TOKENS), slots=_positive(options, SLOTS))


def _positive(options: load_pb2.LoadOptions, name: str) -> int | None:
    value = options.parameters[name].integer if name in options.parameters else 0
    return value if value > 0 else None


def size_settings(sizing: added_model_pb2.ModelSizing, runtime: Runtime[Any]) -> Document:
    """Returns a size as model settings of weft.yaml."""
    found: Document = {}
    if sizing.context_tokens:
        found["context_tokens"] = sizing.context_tokens
    if sizing.slots:
        found["slots"] = sizing.slots
    if sizing.HasField("gpu_layers") and WeightFormat.GGUF in runtime.formats:
        found["extra_arguments"] = [GPU_LAYERS_FLAG, str(sizing.gpu_layers)]
    return found


async def found_size(document: Document, memory: MachineMemory, folders: ProgramFolders) -> tuple[Document | None, str]:
    """Returns context, slots and layers as settings for a model of weft.yaml with a `source` on this machine.

    Returns None and the reason if the model does not fit into this machine's memory, and no settings if its files
    cannot be found: then the defaults of weft.yaml apply.
    """
    runtime = parse_section(ConfiguredRunner, {"name": DEMO_RUNNER, "models": [document]}).engine
    source = parse_source(str(document["source"]), "source")
    try:
        files = await asyncio.to_thread(_files, source, folders)
        sizing, _ = await size_by_memory(source, files, runtime, memory)
    except WeftError as error:
        return (None if error.reason is Reason.INSUFFICIENT_MEMORY else {}), error.message
    return size_settings(sizing, runtime), ""


def _files(source: ModelSource, folders: ProgramFolders) -> FoundFiles:
    """Returns the files of a source on this machine. Raises NOT_FOUND if they are gone."""
    match source:
        case PathSource():
            return FoundFiles(path=Path(source.path))
        case HubSource() | OllamaSource() | LmStudioSource():
            return locate(source, None, folders)
        case _:
            raise WeftError(Reason.NOT_FOUND, f"{source} is not a file of this machine")


async def memory_here(accelerators: AcceleratorSettings) -> MachineMemory:
    """Returns this machine's memory before a mesh runs, so that all memory in use belongs to others."""
    snapshot = await host_observer(accelerators).look()
    devices = tuple(
        DeviceMemory(
            name=device.name,
            total_bytes=device.total_bytes,
            reserved_bytes=DEFAULT_MARGIN_BYTES + (device.used_bytes or 0),
        )
        for device in snapshot.devices
    )
    return MachineMemory(devices=devices, host_bytes=await asyncio.to_thread(host_memory_bytes))
