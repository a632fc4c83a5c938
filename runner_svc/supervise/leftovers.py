"""Finds and ends orphaned processes of an earlier incarnation of this runner.

Orphans exist only if the runner and an engine's guardian were killed simultaneously. They are identified by a tag in
the environment, which all descendants inherit, or by their cgroup leaf, never by name.
"""

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from runner_svc.supervise.cgroup import PREFIX, CgroupLeaf
from runner_svc.supervise.system import System, this_system
from weft.kernel.log import get_logger

log = get_logger("weft.leftovers")

TAG_VARIABLE = "WEFT_SUPERVISOR_TAG"
SWEEP_SECONDS = 5.0
"""Timeout of a sweep; processes that survive it are reported."""
SWEEP_PAUSE_SECONDS = 0.02
MAX_STATE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    tag: str
    leaf: str = ""
    pid: int = 0
    started_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Content of the state file."""

    identity: str
    """Random prefix of every tag of this runner, kept across incarnations."""
    owner_pid: int
    owner_started_at: int
    entries: tuple[_Entry, ...] = field(default=())


class Leftovers:
    """The tags of a runner's processes, and the file that records them for the next incarnation.

    If the file cannot be read or written, no orphans are found, but the runner works.
    """

    def __init__(self, state_file: Path, system: System | None = None) -> None:
        self._file = state_file
        self._system = system or this_system()
        self._state: _State | None = None
        self._is_ours = True

    def sweep(self) -> list[int]:
        """Kills the orphans of an earlier incarnation; returns their ids. Call it before starting any process.

        Blocks for milliseconds per hundred processes on the machine, at most SWEEP_SECONDS. If the file belongs to
        another living process, such as a runner of the same name, nothing is killed or recorded.
        """
        state = self._load()
        if not self._is_ours:
            return []
        killed: set[int] = set()
        deadline = time.monotonic() + SWEEP_SECONDS
        while (found := self._kill(state)) and time.monotonic() < deadline:
            killed |= found
            time.sleep(SWEEP_PAUSE_SECONDS)
        leaves = {CgroupLeaf(Path(entry.leaf)) for entry in state.entries if Path(entry.leaf).name.startswith(PREFIX)}
        while (leaves := {leaf for leaf in leaves if not leaf.remove()}) and time.monotonic() < deadline:
            time.sleep(SWEEP_PAUSE_SECONDS)
        if leaves:
            log.warning("cgroups of an earlier process cannot be removed", paths=[str(leaf.path) for leaf in leaves])
        if killed:
            log.warning("killed processes that an earlier run of this runner left", pids=sorted(killed))
        if found:
            log.error("processes of an earlier run do not end", pids=sorted(found))
        self._save(replace(state, entries=()))
        return sorted(killed)

    def begin(self) -> str:
        """Returns a tag for a process that is about to be started."""
        return f"{self._load().identity}:{secrets.token_hex(8)}"

    def note(self, tag: str, *, leaf: Path | None = None, pid: int = 0) -> None:
        """Records the process with a tag."""
        state = self._load()
        started_at = self._system.started_at(pid) if pid else None
        entry = _Entry(tag=tag, leaf=str(leaf or ""), pid=pid, started_at=started_at or 0)
        self._save(replace(state, entries=(*_without(state.entries, tag), entry)))

    def end(self, tag: str) -> None:
        """Removes a tag once no process with it is left."""
        state = self._load()
        self._save(replace(state, entries=_without(state.entries, tag)))

    def _kill(self, state: _State) -> set[int]:
        found = set()
        for entry in state.entries:
            leaf = CgroupLeaf(Path(entry.leaf))
            if leaf.path.name.startswith(PREFIX):
                found |= leaf.members()
                leaf.kill()
            if entry.pid and self._system.kill_if(entry.pid, partial(self._is_it, entry)):
                found.add(entry.pid)
        return found | kill_tagged(self._system, f"{state.identity}:")

    def _is_it(self, entry: _Entry) -> bool:
        return (
            self._system.started_at(entry.pid) == entry.started_at
            and self._system.variable(entry.pid, TAG_VARIABLE) == entry.tag
        )

    def _load(self) -> _State:
        if self._state is None:
            stored = self._read()
            own = _State(
                identity=stored.identity if stored is not None else secrets.token_hex(16),
                owner_pid=os.getpid(),
                owner_started_at=self._system.started_at(os.getpid()) or 0,
                entries=stored.entries if stored is not None else (),
            )
            if stored is not None and self._is_somebody_else(stored):
                log.error("another process runs under this runner's name", pid=stored.owner_pid)
                self._is_ours = False
                own = replace(own, identity=secrets.token_hex(16), entries=())
            self._state = own
            self._save(own)
        return self._state

    def _is_somebody_else(self, stored: _State) -> bool:
        return stored.owner_pid != os.getpid() and self._system.started_at(stored.owner_pid) == stored.owner_started_at

    def _read(self) -> _State | None:
        try:
            if self._file.stat().st_size > MAX_STATE_BYTES:
                return None
            return msgspec.json.decode(self._file.read_bytes(), type=_State)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("cannot determine which processes an earlier run left", file=self._file.name, error=str(error))
            return None

    def _save(self, state: _State) -> None:
        self._state = state
        if not self._is_ours:
            return
        fresh = self._file.with_name(f"{self._file.name}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Not synced: after a power failure there are no processes.
            fresh.write_bytes(msgspec.json.encode(state))
            fresh.replace(self._file)
        except OSError as error:
            log.warning("cannot record which processes run", file=self._file.name, error=error.strerror)
            with suppress(OSError):
                fresh.unlink()


def kill_tagged(system: System, start_of_tag: str) -> set[int]:
    """Kills each process of the own user with a matching tag; returns those that were alive."""

    def tagged(pid: int) -> bool:
        return (system.variable(pid, TAG_VARIABLE) or "").startswith(start_of_tag)

    own = os.getpid()
    return {
        pid
        for pid in system.own_processes()
        if pid != own and tagged(pid) and system.kill_if(pid, partial(tagged, pid))
    }


def _without(entries: tuple[_Entry, ...], tag: str) -> tuple[_Entry, ...]:
    return tuple(entry for entry in entries if entry.tag != tag)
