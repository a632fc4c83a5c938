"""The runner processes of `weft up`: start, supervision, restart, stop.

Also removes runners that are no longer configured from the mesh (`StartedRunners`).
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import grpc

from runner_svc.policy.backoff import RestartHistory, RestartLimits
from runner_svc.session.session_file import SessionFile
from runner_svc.supervise import parent_death
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2_grpc
from weft.kernel.channels.outbound import MESH_PROCESS
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import require_name
from weft_app.compose.home import WeftHome, is_socket_address
from weft_app.config.loader import LOCAL_SETTINGS_VARIABLE

if TYPE_CHECKING:
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub


log = get_logger("weft_app.compose")

RESTART_PAUSE_SECONDS = 1.0
REFUSAL_CODES = frozenset({2, 4})
"""Exit codes for invalid arguments and for resources in use; see docs/start.md."""
MAX_REFUSALS = 3
"""Consecutive refusals after which a start is abandoned; before that, an earlier process may free its resources."""
MAX_LAST_OUTPUT_BYTES = 1024
KILL_MARGIN_SECONDS = 15.0
"""Time after the drain for a runner to end its backends."""
CALL_TIMEOUT_SECONDS = 5.0
MAX_NAMES = 10_000
_Outcome = pb.RetireSessionResponse.Outcome

_LATER = MappingProxyType(
    {
        pb.RetireSessionResponse.OUTCOME_LIVES: "it may still run, and is taken out of the mesh once it has ended",
        pb.RetireSessionResponse.OUTCOME_HOLDS_MEMORY: (
            "it still has leases of accelerator memory (weft mesh lease list), and is "
            "removed from the mesh when they have ended"
        ),
    }
)


class RunnerChild:
    """A `weft serve runner` process. It and its backends die with this process, even if this process is killed."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        output: Path,
        clock: Clock,
        *,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`notify` gets a message when the process exits unexpectedly."""
        self.name = name
        self._notify = notify
        self._arguments = arguments
        self._output = output
        self._clock = clock
        self._deaths = RestartHistory()
        self._refusals = 0
        self._last_output = ""
        self._process: asyncio.subprocess.Process | None = None
        """The last process; None: its start failed."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while the process runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def refusal(self) -> str:
        """Why the process does not start, such as the last line of its output; empty if it starts."""
        return self._last_output if self._refusals >= MAX_REFUSALS else ""

    async def start(self) -> None:
        """Starts the process and keeps it running; a start that the system refuses is retried."""
        await self._try_to_spawn()
        self._watch = start_critical(self._keep_running(), name=f"runner-{self.name}")

    async def stop(self, grace_seconds: float) -> None:
        """Drains the process with SIGTERM, and kills it KILL_MARGIN_SECONDS after the grace. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await stop_tasks([watch])
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_seconds + KILL_MARGIN_SECONDS)
            return
        log.error("runner did not end, killing it", runner=self.name)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def kill(self) -> None:
        """Kills the process without a restart. Its backends die with it."""
        if self._watch is not None:
            self._watch.cancel()
        if self.pid is not None and self._process is not None:
            self._process.kill()

    async def _spawn(self) -> asyncio.subprocess.Process:
        # Logs go to another file; this one gets other output, such as the traceback of a crash.
        with self._output.open("wb") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", str(Path(parent_death.__file__)), str(os.getpid())),
                *(sys.executable, "-m", "weft_app.cli.main", *self._arguments),
                # The file of `--config` already contains these settings, as they were when it came into force.
                env={name: value for name, value in os.environ.items() if name != LOCAL_SETTINGS_VARIABLE}
                | {MESH_PROCESS: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C on the terminal must reach only this process, which drains the runners.
                start_new_session=True,
            )

    async def _try_to_spawn(self) -> None:
        could_start = self._process is not None
        try:
            self._process = await self._spawn()
        except OSError as error:  # such as a limit of processes or open files, which may be temporary
            self._process = None
            self._refusals += 1
            self._last_output = f"its process cannot be started: {error.strerror}"
            log.error("runner process cannot be started", runner=self.name, why=error.strerror)  # noqa: TRY400 - no traceback needed
            return
        if not could_start:
            self._refusals = 0

    async def _keep_running(self) -> None:
        while True:
            if self._process is not None:
                await self._until_ended(self._process)
            self._deaths, pause = self._deaths.after_death(self._clock.monotonic(), RestartLimits())
            pause = max(RESTART_PAUSE_SECONDS, pause)
            log.warning("runner process is restarted", runner=self.name, pause_seconds=pause)
            await self._clock.sleep(pause)
            await self._try_to_spawn()

    async def _until_ended(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._refusals = self._refusals + 1 if code in REFUSAL_CODES else 0
        self._last_output = self._read_last_output() if code > 0 else f"see {self._output.with_suffix('.log')}"
        log.error("runner process ended", runner=self.name, code=code, why=self._last_output)
        self._notify(f"runner {self.name} ended ({_how_it_ended(code)}): {self._last_output}; it is restarted")

    def _read_last_output(self) -> str:
        with suppress(OSError), self._output.open("rb") as output:
            output.seek(max(0, self._output.stat().st_size - MAX_LAST_OUTPUT_BYTES))
            lines = output.read(MAX_LAST_OUTPUT_BYTES).decode("utf-8", "replace").strip().splitlines()
            if lines:
                return lines[-1].removeprefix("weft: ")
        return f"see {self._output}"


def _how_it_ended(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredRunner:
    """A runner that was or will be removed from the mesh."""

    name: str
    models: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    """Pools without remaining members."""
    later: str = ""
    """Why it is still in the mesh; empty if it was removed."""


class StartedRunners:
    """The names of runners started on a home, stored across restarts of its host."""

    def __init__(self, home: WeftHome) -> None:
        self._home = home
        self._file = home.state / "started-runners.json"

    async def retire_others(self, names: Collection[str], registry: grpc.aio.Channel) -> list[RetiredRunner]:
        """Retires runners that are not in `names`, and stores `names` for the next start.

        Runners that cannot be removed yet stay stored, and are retried at the next start.
        """
        known = self._read()
        # Written before runners start, so that the next start knows them after a crash.
        self._write(known | set(names))
        found = [await self._retire(name, registry) for name in sorted(known - set(names))]
        retired = [each for each in found if each is not None]
        self._write(set(names) | {each.name for each in retired if each.later})
        return retired

    async def _retire(self, name: str, registry: grpc.aio.Channel) -> RetiredRunner | None:
        """Returns the retired runner; None if it is unknown to the mesh or its session id is lost."""
        is_alive = await self._answers(name)
        if not is_alive:
            # Left by a process that was killed or refused to start; `weft status` would call it.
            (self._home.run / f"runner-{name}.sock").unlink(missing_ok=True)
        file = SessionFile(self._home.state / "runners" / f"{name}.session")
        session_id = file.read()
        if not session_id:
            return None
        stub = cast("RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(registry))
        request = pb.RetireSessionRequest(session_id=session_id, process_ended=not is_alive)
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
        """Whether the runner's process may be alive: its socket is open or its address is unknown."""
        path = self._home.run / f"runner-{name}.sock"
        if not is_socket_address(path):
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
        """Writes the names. A failure is only logged; the next start then retires fewer runners."""
        try:
            replace_file(self._file, f"{json.dumps(sorted(names))}\n".encode())
        except OSError as error:
            log.warning("the list of runners cannot be written", file=str(self._file), why=error.strerror)


async def retire_others(
    home: WeftHome,
    names: Collection[str],
    registry: grpc.aio.Channel,
    names_waited_for: Callable[[], Awaitable[Collection[str]]],
) -> list[str]:
    """Retires runners that are not in `names`; returns sentences about them."""
    retired, waited_for = await StartedRunners(home).retire_others(names, registry), frozenset[str]()
    try:
        waited_for = frozenset(await names_waited_for() if retired else ())
    except WeftError as error:
        log.warning("tasks that wait for removed runners are not shown", why=error.message)
    return retirement_notes(retired, waited_for)


def retirement_notes(retired: Iterable[RetiredRunner], waited_for: Collection[str]) -> list[str]:
    """Returns a sentence about each retired runner. Durable tasks wait for the models and pools in `waited_for`."""
    return [_note(each, [name for name in (*each.models, *each.pools) if name in waited_for]) for each in retired]


def left_behind_notes(home: WeftHome, configured: Collection[str]) -> dict[str, str]:
    """Returns a sentence about each runner that is no longer configured but has added models."""
    # Imported here: most starts find no such models.
    from runner_svc.added_models_file import models_left_behind  # noqa: PLC0415

    return {
        left.runner: f"{', '.join(left.models)}: added to the runner {left.runner}, which the configuration does not "
        f"have; name a runner {left.runner} in it, attach or load them again, or delete {left.file} to forget them"
        for left in models_left_behind(home.state / "runners", configured)
    }


def _note(retired: RetiredRunner, waited_for: list[str]) -> str:
    if retired.later:
        return f"runner {retired.name} is not in the configuration any more: {retired.later}"
    models = f" with {', '.join(retired.models)}" if retired.models else ""
    note = f"runner {retired.name} is not in the configuration any more and was taken out of the mesh{models}"
    if not waited_for:
        return note
    names = ", ".join(dict.fromkeys(waited_for))
    return f"{note}; durable tasks still wait for {names} (weft get tasks): serve it again, or cancel them"
