"""The runners that `weft up` started from its own file; those that the file no longer names leave the mesh."""

import asyncio
import json
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import grpc
import structlog

from runner_svc.session.session_file import SessionFile
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2_grpc
from weft.kernel.errors import WeftError
from weft.kernel.file_replacement import replace_file
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call
from weft_app.compose.home import MAX_SOCKET_PATH_BYTES, WeftHome

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub

log = structlog.get_logger("weft_app.compose")

CALL_TIMEOUT_SECONDS = 5.0
MAX_NAMES = 10_000
"""Maximum number of remembered runners."""
_Outcome = pb.RetireSessionResponse.Outcome
_LATER = MappingProxyType(
    {
        pb.RetireSessionResponse.OUTCOME_LIVES: "it may still run, and is taken out of the mesh once it has ended",
        pb.RetireSessionResponse.OUTCOME_HOLDS_MEMORY: (
            "accelerator memory is booked for it (weft lease list), and it is taken out of the mesh once that is free"
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredRunner:
    """A runner that was taken out of the mesh, or will be."""

    name: str
    models: tuple[str, ...] = ()
    """The models removed with it."""
    pools: tuple[str, ...] = ()
    """The pools without members after that."""
    later: str = ""
    """Why it is not out of the mesh yet; empty: it is."""


class OwnRunners:
    """The names of the runners that were started on a home, kept across restarts of its host."""

    def __init__(self, home: WeftHome) -> None:
        self._home = home
        self._file = home.state / "started-runners.json"

    async def retire_others(self, names: Collection[str], registry: grpc.aio.Channel) -> list[RetiredRunner]:
        """Retires runners that are not in `names` any more, and stores `names` for the next start.

        One that cannot be taken out yet stays stored, and is tried again at the next start.
        """
        known = self._read()
        # Written before anything is started: after a crash the next start knows them.
        self._write(known | set(names))
        found = [await self._retire(name, registry) for name in sorted(known - set(names))]
        retired = [each for each in found if each is not None]
        self._write(set(names) | {each.name for each in retired if each.later})
        return retired

    async def _retire(self, name: str, registry: grpc.aio.Channel) -> RetiredRunner | None:
        """The result for one runner; None: unknown to the mesh, or its session id is lost."""
        file = SessionFile(self._home.state / "runners" / f"{name}.session")
        session_id = file.read()
        if not session_id:
            return None
        stub = cast("RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(registry))
        request = pb.RetireSessionRequest(session_id=session_id, process_ended=not await self._answers(name))
        try:
            answer = await stub.RetireSession(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return RetiredRunner(name=name, later=error_from_call(error, Reason.SERVICE_UNAVAILABLE).message)
        later = _LATER.get(answer.outcome, "")
        if not later:
            file.forget()
        log.info("runner is not in the configuration", runner=name, outcome=_Outcome.Name(answer.outcome))
        if answer.outcome == pb.RetireSessionResponse.OUTCOME_UNKNOWN:
            return None
        return RetiredRunner(name=name, models=tuple(answer.models), pools=tuple(answer.pools), later=later)

    async def _answers(self, name: str) -> bool:
        """Whether its process may be alive: it listens, or its address is unknown."""
        path = self._home.run / f"runner-{name}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            return True
        try:
            _, writer = await asyncio.open_unix_connection(str(path))
        except OSError:
            return False
        writer.close()
        return True

    def _read(self) -> set[str]:
        try:
            found = json.loads(self._file.read_text("utf-8"))
            return {require_name(name, "runner") for name in found[:MAX_NAMES]}
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, TypeError, KeyError, WeftError) as error:
            log.warning("the list of runners cannot be read", file=str(self._file), why=str(error))
            return set()

    def _write(self, names: Iterable[str]) -> None:
        """A failed write is logged and is no reason not to start: a later start retires less."""
        try:
            replace_file(self._file, f"{json.dumps(sorted(names))}\n".encode())
        except OSError as error:
            log.warning("the list of runners cannot be written", file=str(self._file), why=error.strerror)


def retirement_notes(retired: Iterable[RetiredRunner], waited_for: Collection[str]) -> list[str]:
    """A sentence about each retired runner; `waited_for`: the models and pools for which durable tasks wait."""
    return [_note(each, [name for name in (*each.models, *each.pools) if name in waited_for]) for each in retired]


def _note(retired: RetiredRunner, waited_for: list[str]) -> str:
    if retired.later:
        return f"runner {retired.name} is not in the configuration any more: {retired.later}"
    models = f" with {', '.join(retired.models)}" if retired.models else ""
    note = f"runner {retired.name} is not in the configuration any more and was taken out of the mesh{models}"
    if not waited_for:
        return note
    names = ", ".join(dict.fromkeys(waited_for))
    return f"{note}; durable tasks still wait for {names} (weft get tasks): serve it again, or cancel them"
