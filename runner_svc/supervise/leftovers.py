"""Finds and ends orphaned processes of an earlier incarnation of this runner.

Orphans exist only if the runner and an engine's guardian were killed simultaneously. They are identified by a tag in
the environment, which all descendants inherit, or by their cgroup leaf, never by their program.
"""

import os
import secrets
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from runner_svc.supervise.cgroup import PREFIX, CgroupLeaf
from runner_svc.supervise.system import PortableSystem, this_system
from weft.kernel.machine.cgroups import own_cgroup
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.decoding import DECODE_FAULTS

log = get_logger("weft.leftovers")

TAG_VARIABLE = "WEFT_SUPERVISOR_TAG"
SWEEP_SECONDS = 5.0
"""Timeout of a sweep; processes that survive it are reported."""
SWEEP_PAUSE_SECONDS = 0.02
MAX_STATE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Content of the state file."""

    identity: str
    """Random prefix of every tag of this runner and of its leaves' names, kept across incarnations."""
    owner_pid: int
    owner_started_at: int
    cgroup: str = ""
    """The cgroup below which its leaves are; empty: none."""


class Leftovers:
    """The tags of a runner's processes, and the file with their prefix for the next incarnation.

    If the file cannot be read or written, no orphans are found, but the runner works.
    """

    def __init__(self, state_file: Path, system: PortableSystem | None = None) -> None:
        self._file = state_file
        self._system = system or this_system()
        self._state: _State | None = None
        self._earlier_cgroup = ""
        self._is_ours = True

    def sweep(self) -> list[int]:
        """Kills the orphans of an earlier incarnation; returns their ids. Call it before starting any process.

        Blocks for milliseconds per hundred processes on the machine, at most SWEEP_SECONDS. If the file belongs to
        another living process, such as a runner of the same name, nothing is killed or recorded.
        """
        state = self._load()
        if not self._is_ours:
            return []
        folders = {self._earlier_cgroup, state.cgroup} - {""}
        leaves = {
            CgroupLeaf(path)
            for folder in folders
            for path in Path(folder).glob(f"{PREFIX}{leaf_name(state.identity)}-*")
        }
        killed: set[int] = set()
        deadline = time.monotonic() + SWEEP_SECONDS
        while (found := self._kill(state, leaves)) and time.monotonic() < deadline:
            killed |= found
            time.sleep(SWEEP_PAUSE_SECONDS)
        while (leaves := {leaf for leaf in leaves if not leaf.remove()}) and time.monotonic() < deadline:
            time.sleep(SWEEP_PAUSE_SECONDS)
        if leaves:
            log.warning("cgroups of an earlier process cannot be removed", paths=[str(leaf.path) for leaf in leaves])
        if killed:
            log.warning("killed processes that an earlier run of this runner left", pids=sorted(killed))
        if found:
            log.error("processes of an earlier run do not end", pids=sorted(found))
        return sorted(killed)

    def begin(self) -> str:
        """Returns a tag for a process that is about to be started."""
        return f"{self._load().identity}:{secrets.token_hex(8)}"

    def _kill(self, state: _State, leaves: set[CgroupLeaf]) -> set[int]:
        found = set()
        for leaf in leaves:
            found |= leaf.members()
            leaf.kill()
        return found | kill_tagged(self._system, f"{state.identity}:")

    def _load(self) -> _State:
        if self._state is None:
            stored = self._read()
            if stored is not None and self._is_somebody_else(stored):
                log.error("another process runs under this runner's name", pid=stored.owner_pid)
                self._is_ours, stored = False, None
            self._earlier_cgroup = "" if stored is None else stored.cgroup
            self._state = _State(
                identity=secrets.token_hex(16) if stored is None else stored.identity,
                owner_pid=os.getpid(),
                owner_started_at=self._system.started_at(os.getpid()) or 0,
                cgroup=str(own_cgroup() or ""),
            )
            self._save(self._state)
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
        except (OSError, *DECODE_FAULTS) as error:
            log.warning("cannot determine which processes an earlier run left", file=self._file.name, error=str(error))
            return None

    def _save(self, state: _State) -> None:
        if not self._is_ours:
            return
        try:
            replace_file(self._file, msgspec.json.encode(state))
        except OSError as error:
            log.warning("cannot record which processes run", file=self._file.name, error=error.strerror)


def leaf_name(tag: str) -> str:
    """Returns the name of the cgroup leaf for a tag."""
    return tag.replace(":", "-")


def kill_tagged(system: PortableSystem, start_of_tag: str) -> set[int]:
    """Kills each process of the own user with a matching tag; returns those that were alive."""

    def tagged(pid: int) -> bool:
        return (system.variable(pid, TAG_VARIABLE) or "").startswith(start_of_tag)

    own = os.getpid()
    return {
        pid
        for pid in system.own_processes()
        if pid != own and tagged(pid) and system.kill_if(pid, partial(tagged, pid))
    }
