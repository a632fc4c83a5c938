"""Prompts that an engine of llama.cpp saves in shared memory when they lose their slot."""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from typing_extensions import override

from runner_svc.backend.port import LoadOrder, SavedSlot
from runner_svc.memory.machine_memory import engine_memory_bytes
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime_settings import GgufModelSettings
from runner_svc.runtimes.started_server import StartedServer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it is private
"""In-memory file system: prompts must not be written to disk."""
MACHINE_PART = 8
"""The prompts of one engine use at most this fraction of the machine's memory (1/8) ..."""
SHARED_PART = 2
"""... and of the free shared memory when the engine starts (1/2): containers have 64 MiB of it."""
MAX_COMPARED_BYTES = 256 * 1024 * 1024
"""Maximum size of a program, adapter or template that is compared with those of other machines."""
_OF_ONE_PROCESS = frozenset({"--model", "--alias", "--port", "--threads", "--slot-save-path"})
"""Flags whose values may differ between engines that can restore each other's prompts."""
SAVE_SECONDS = 10.0
"""Timeout for saving or restoring a slot; either takes about 0.1 s per 100 MB."""
_PREFIX = "weft-prompts-"
_NAME = re.compile(rf"{_PREFIX}(\d{{1,10}})-")


class SavedPrompts:
    """The private folder of one server process."""

    def __init__(self, budget_mb: int) -> None:
        """Creates the folder, and deletes leftovers of runners that crashed."""
        self.budget_bytes = 0
        self.folder: Path | None = None
        with suppress(OSError):
            free = shutil.disk_usage(SHARED_MEMORY).free // SHARED_PART
            machine = (engine_memory_bytes() or 0) // MACHINE_PART
            self.budget_bytes = min(budget_mb * MEBIBYTE, free, machine)
            _remove_abandoned()
            self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
        if self.folder is None:
            self.budget_bytes = 0

    @property
    def byte_count(self) -> int:
        """Current size of the saved prompts."""
        if self.folder is None:
            return 0
        with suppress(OSError):
            return sum(entry.stat().st_size for entry in os.scandir(self.folder))
        return 0

    def delete(self, names: Sequence[str]) -> None:
        """Deletes saved prompts; missing ones are ignored."""
        if self.folder is None:
            return
        for name in names:
            with suppress(OSError):
                (self.folder / name).unlink()

    def remove(self) -> None:
        """Deletes the folder with all prompts."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class _Saved(msgspec.Struct):
    n_saved: int = 0
    n_written: int = 0


Settings = TypeVar("Settings", bound=GgufModelSettings)


class PromptSavingServer(StartedServer[Settings], Generic[Settings]):
    """Backend of a server process that saves its prompts in files."""

    def __init__(self, model: Settings, context: ModelContext) -> None:
        super().__init__(model, context)
        self._saved: SavedPrompts | None = None
        self._state_identity = self._state_kind = ""

    async def begin_saving(self, arguments: Sequence[str], order: LoadOrder) -> None:
        """Makes room for the prompts of a server that is started with these arguments, if they are saved."""
        if self.model.kept_prompts_mb:
            self._saved = SavedPrompts(self.model.kept_prompts_mb)
            command = (*(self.context.command or self.command), *arguments)
            self._state_identity = await asyncio.to_thread(state_identity, command, self.environment(order))
            self._state_kind = await asyncio.to_thread(state_kind, command)

    @property
    def saved_folder(self) -> Path | None:
        """Where the server saves prompts; None: it saves none."""
        return None if self._saved is None else self._saved.folder

    @override
    def note_build(self, build: str) -> None:
        # It must be equal for a restore.
        if self._saved is not None and build:
            self._state_identity = sha256(f"{build} {self._state_identity}".encode()).hexdigest()
            self._state_kind = self._state_kind and sha256(f"{build} {self._state_kind}".encode()).hexdigest()

    @property
    @override
    def kept_prompt_bytes(self) -> int:
        return 0 if self._saved is None else self._saved.budget_bytes

    @override
    async def save_slot(self, slot: int, name: str) -> SavedSlot:
        if self._http is None:
            return SavedSlot()
        try:
            saved = msgspec.json.decode(await self._act(slot, "save", name), type=_Saved)
        except JSON_FAULTS as error:
            raise WeftError(Reason.BACKEND_ERROR, f"the server did not say how it saved slot {slot}") from error
        return SavedSlot(byte_count=saved.n_written, token_count=saved.n_saved)

    @override
    async def restore_slot(self, slot: int, name: str) -> None:
        await self._act(slot, "restore", name)

    async def _act(self, number: int, action: str, name: str) -> bytes:
        body, route = msgspec.json.encode({"filename": name}), f"/slots/{number}?action={action}"
        status, answer = await self._running().call_route("POST", route, SAVE_SECONDS, body)
        if status != 200:
            raise WeftError(Reason.BACKEND_ERROR, f"the server refused to {action} slot {number} (status {status})")
        return answer

    @override
    def delete_saved(self, names: Sequence[str]) -> None:
        if self._saved is not None:
            self._saved.delete(names)

    @property
    @override
    def state_kind(self) -> str:
        return self._state_kind

    @property
    @override
    def state_identity(self) -> str:
        return self._state_identity

    @override
    def saved_file(self, name: str) -> Path | None:
        return None if (folder := self.saved_folder) is None else folder / name

    @override
    def resident_bytes(self) -> int | None:
        resident = super().resident_bytes()
        return resident if resident is None or self._saved is None else resident + self._saved.byte_count

    @override
    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            saved, self._saved = self._saved, None
            if saved is not None:
                saved.remove()


def state_identity(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Returns a digest of a server's command and variables, with size and time of the files that the command names.

    llama.cpp accepts saved slots of another model with the same shape, and would answer with them.
    """
    known: list[object] = [*arguments, *sorted(variables.items())]
    with suppress(PackageNotFoundError):
        known.append(version("xllamacpp"))
    for argument in (shutil.which(arguments[0]) or "", *arguments):
        # An adapter is FILE:SCALE.
        for path in (Path(argument), Path(argument.rpartition(":")[0])):
            with suppress(OSError):
                if path.is_file():
                    stat = path.stat()
                    known.append((stat.st_size, stat.st_mtime_ns))
    return sha256(repr(known).encode()).hexdigest()


def state_kind(arguments: Sequence[str]) -> str:
    """Returns a digest of a server's build and arguments that is the same on all machines; empty: unknown.

    Files are compared by content, except the model's, which has its own digest, and the interpreter of a server in
    Python, whose library reports its version.
    """
    known: list[object] = []
    with suppress(PackageNotFoundError):
        known.append(version("xllamacpp"))
    for number, argument in enumerate(arguments):
        is_interpreter = number == 0 and Path(argument).name.startswith("python")
        if is_interpreter or (number and arguments[number - 1] in _OF_ONE_PROCESS):
            continue
        # An adapter is FILE:SCALE.
        file = Path(shutil.which(argument) or argument if number == 0 else argument.rpartition(":")[0] or argument)
        try:
            if not file.is_file():
                known.append(argument)
            elif file.stat().st_size > MAX_COMPARED_BYTES:
                return ""
            else:
                known.append(sha256(file.read_bytes()).hexdigest())
        except OSError:
            known.append(argument)
    return sha256(repr(known).encode()).hexdigest()


def _remove_abandoned() -> None:
    for folder in SHARED_MEMORY.iterdir():
        if (found := _NAME.match(folder.name)) is not None and not Path("/proc", found[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)
