"""The size of model files that were found on this machine: the one that `weft run` would choose, see `model_sizer`."""

import asyncio
from pathlib import Path

from runner_svc.memory.lease_manager import DEFAULT_MARGIN_BYTES
from runner_svc.memory.machine_memory import host_memory_bytes
from runner_svc.model_store.found import FoundFiles, ProgramFolders, locate
from runner_svc.policy.model_sizing import DeviceMemory, MachineMemory
from weft.api.runner.v1 import load_pb2
from weft.kernel.errors import WeftError
from weft.kernel.model_source import HubSource, LmStudioSource, ModelSource, OllamaSource, PathSource, parse_source
from weft.kernel.reasons import Reason
from weft_app.compose.accelerators import host_observer
from weft_app.compose.added_models import SizingRequest, size_settings
from weft_app.compose.demo import DEMO_RUNNER
from weft_app.compose.model_sizer import size_by_memory
from weft_app.config.config import AcceleratorSettings
from weft_app.config.document import Document
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner


async def found_size(document: Document, memory: MachineMemory, folders: ProgramFolders) -> tuple[Document | None, str]:
    """Returns context, slots and layers for a model of weft.yaml with a `source` on this machine, as settings of it.

    None, with the reason, for one that no memory of this machine holds. Of one whose files cannot be found nothing is
    chosen: the defaults of weft.yaml hold.
    """

    async def read_memory() -> MachineMemory:
        return memory

    runner = parse_section(ConfiguredRunner, {"name": DEMO_RUNNER, "models": [document]})
    source = parse_source(str(document["source"]), "source")
    try:
        files = await asyncio.to_thread(_files, source, folders)
        request = SizingRequest(
            name=runner.models[0].name,
            source=source,
            path=files.path,
            projector=files.projector,
            runtime=runner.engine,
            options=load_pb2.LoadOptions(),
            memory=read_memory,
        )
        sized = await size_by_memory(request)
    except WeftError as error:
        return (None if error.reason is Reason.INSUFFICIENT_MEMORY else {}), error.message
    return size_settings(sized.sizing, runner.engine), ""


def _files(source: ModelSource, folders: ProgramFolders) -> FoundFiles:
    """Returns the files of a source that was found on this machine. Raises NOT_FOUND where it is gone."""
    match source:
        case PathSource():
            return FoundFiles(path=Path(source.path))
        case HubSource() | OllamaSource() | LmStudioSource():
            return locate(source, None, folders)
        case _:
            raise WeftError(Reason.NOT_FOUND, f"{source} is not a file of this machine")


async def memory_here(accelerators: AcceleratorSettings) -> MachineMemory:
    """Returns the memory of this machine: no mesh of it runs yet, so that what is in use is others'."""
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
