"""Engines and model files of this machine as runners of weft.yaml."""

import asyncio
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weft.api.runner.v1 import model_store_pb2
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.models.model_source import free_name, parse_source, suggested_name
from weft.kernel.telemetry.log import get_logger
from weft_app.compose.demo import DEMO_RUNNER
from weft_app.compose.home import WeftHome
from weft_app.config.config import USUAL_ADDRESSES, AcceleratorSettings, DiscoverySettings
from weft_app.config.document import Document

if TYPE_CHECKING:
    from runner_svc.discovery import FoundServer

MAX_FILE_BYTES = 1024**2
ANSWER_SECONDS = 2.0
"""Timeout of one answer; all addresses are queried concurrently."""
OLLAMA_VARIABLE = "OLLAMA_HOST"
_ANY_ADDRESS = ("", "0.0.0.0", "[::]", "::")  # noqa: S104 - addresses that a server listens on, not ours
_FILE = "discovered.json"

log = get_logger("weft.discovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFile:
    """A model file of another program, and the name to serve it under."""

    name: str
    model: model_store_pb2.FoundModel
    size: Document = field(default_factory=dict)
    """Chosen context, slots and layers, as settings of weft.yaml; empty: the defaults."""

    def settings(self) -> Document:
        """Returns the model in the form of weft.yaml."""
        return {"name": self.name, "source": self.model.source, "start_asleep": True, **self.size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """What was found on this machine."""

    servers: "tuple[FoundServer, ...]" = ()
    files: tuple[FoundFile, ...] = ()
    left_out: int = 0
    """Number of model files not to serve: those of running programs that serve them, folders, those beyond the maximum,
    and those too large for the memory of this machine."""

    @property
    def is_something(self) -> bool:
        """Whether there is anything to serve."""
        return bool(self.files) or any(not server.why_empty for server in self.servers)

    def runners(self) -> list[Document]:
        """Returns the runners that serve it, in the form of weft.yaml."""
        taken = [DEMO_RUNNER]
        found: list[Document] = []
        for server in self.servers:
            if not server.why_empty:
                taken.append(free_name(server.program, taken.__contains__))
                found.append({"name": taken[-1], "url": server.url})
        models = [each.settings() for each in self.files]
        return [*found, {"name": DEMO_RUNNER, "models": models}] if models else found


async def discover(
    settings: DiscoverySettings,
    home: WeftHome,
    environment: Mapping[str, str] = os.environ,
    accelerators: AcceleratorSettings | None = None,
) -> Discovered:
    """Searches this machine within the time limits of the settings.

    Files get the size that `weft run` would choose for this machine with these accelerators; None: no accelerators.
    """
    # Imported here: a start with a configuration searches for nothing and needs no HTTP client.
    from runner_svc.added_models_file import remembered_models  # noqa: PLC0415
    from runner_svc.discovery import find_servers  # noqa: PLC0415
    from runner_svc.model_store.found import found_models, program_folders  # noqa: PLC0415

    servers = await find_servers(probed_addresses(settings, environment), ANSWER_SECONDS)
    # In threads: a running mesh searches, too, and folders may be large or on a network.
    files = await asyncio.to_thread(found_models, program_folders(environment)) if settings.max_files else []
    added = [each.name for each in await asyncio.to_thread(remembered_models, home.state / "runners")]
    found = arranged(servers, files, settings.max_files, added)
    if accelerators is None or not found.files:
        return found
    from weft_app.compose.model_sizes import found_size, memory_here  # noqa: PLC0415 - see above

    memory, folders = await memory_here(accelerators), program_folders(environment)
    sizes = await asyncio.gather(*(found_size(file.settings(), memory, folders) for file in found.files))
    for file, (_, why) in zip(found.files, sizes, strict=True):
        if why:
            log.warning("no size was chosen for a model file", model=file.name, why=why)
    kept = tuple(
        replace(file, size=size) for file, (size, _) in zip(found.files, sizes, strict=True) if size is not None
    )
    return replace(found, files=kept, left_out=found.left_out + len(sizes) - len(kept))


def arranged(
    servers: "Sequence[FoundServer]",
    files: Sequence[model_store_pb2.FoundModel],
    max_files: int,
    names: Collection[str],
) -> Discovered:
    """Chooses the files to serve and their names; `names` are taken."""
    running = {server.program for server in servers if not server.why_empty}
    taken = {name.lower() for server in servers for name in server.models} | {name.lower() for name in names}
    chosen: list[FoundFile] = []
    for file in files:
        is_served = file.program.replace(".", "-") in running
        if len(chosen) >= max_files or is_served or file.form != model_store_pb2.STORED_FORM_GGUF:
            continue
        name = free_name(suggested_name(parse_source(file.source, "source")), taken.__contains__)
        taken.add(name)
        chosen.append(FoundFile(name=name, model=file))
    return Discovered(servers=tuple(servers), files=tuple(chosen), left_out=len(files) - len(chosen))


def probed_addresses(settings: DiscoverySettings, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the addresses to probe: those of the settings, or the usual ones and that of Ollama's own variable."""
    if settings.addresses != USUAL_ADDRESSES:
        return settings.addresses
    return tuple(dict.fromkeys((*USUAL_ADDRESSES, *ollama_address(environment))))


def ollama_address(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the address in Ollama's own variable; empty if it has no port."""
    host, colon, port = environment.get(OLLAMA_VARIABLE, "").strip().rpartition("://")[2].rstrip("/").rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port[:6]) <= 65_535:
        return ()
    return (f"{'127.0.0.1' if host in _ANY_ADDRESS else host}:{int(port)}",)


def keep_discovered(found: Discovered, home: WeftHome) -> None:
    """Writes the runners for `discovered_runners`. Raises INVALID_ARGUMENT."""
    try:
        home.state.mkdir(parents=True, exist_ok=True)
        replace_file(home.state / _FILE, f"{json.dumps({'runners': found.runners()}, indent=2)}\n".encode())
    except OSError as error:
        raise invalid_field("--home", f"{home.state / _FILE} cannot be written: {error.strerror}") from error


def discovered_runners(home: WeftHome) -> list[dict[str, Any]]:
    """Returns the runners that `keep_discovered` wrote. Raises INVALID_ARGUMENT if they cannot be read."""
    path = home.state / _FILE
    try:
        with path.open("rb") as file:
            runners = json.loads(file.read(MAX_FILE_BYTES))["runners"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FieldError("--discovered", f"{path} cannot be read; start with weft up --discover=yes") from error
    if not isinstance(runners, list):
        raise invalid_field("--discovered", f"{path} has no list of runners; start with weft up --discover=yes")
    return runners
