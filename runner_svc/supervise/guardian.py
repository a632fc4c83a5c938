"""The guardian of an engine, a separate process.

It is run as `python -I -S guardian.py <socket> <runner's pid> <leaf> <mode> <bytes> <score>`. It becomes the sub-reaper
of the engine's descendants, so that none can leave its tree, starts the engine in its own session, and waits. When the
runner dies or sends KILL_ALL, or the engine has ended, it kills every descendant regardless of session or group. It is
a separate program because the runner has many threads and must not run Python in a fork of itself, and because it must
briefly outlive the runner. Standard library only.

The socket is its lifeline. The runner sends the engine's command line (4 bytes of length, then NUL between arguments;
not in the guardian's own arguments, where a search for the engine's name would find it), and later KILL_ALL. The
guardian sends lines: `started <pid> <errno of entering the leaf, or 0>` or `failed <errno>`, then
`ended exited|killed|dumped <number>`, and `left <pid>...` for processes that could not be killed. End of file means
that the peer has ended.

`bytes` limits the private memory of each engine process (0: no limit), and `score` is added to their oom_score_adj;
both only in mode `linux`. The guardian itself keeps the runner's score.

Mode `linux` uses prctl and /proc. Mode `portable` has neither and finds descendants through ps, except those that have
left their parent's tree before.
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

LINUX = "linux"
PORTABLE = "portable"
KILL_ALL = b"k"
MAX_COMMAND_BYTES = 2 * 1024 * 1024
"""Linux's limit on arguments and environment with a stack of 8 MiB."""
KILL_SECONDS = 10.0
"""How long SIGKILL is repeated; only a process in an uninterruptible wait survives the first."""
FIRST_PAUSE_SECONDS = 0.001
MAX_PAUSE_SECONDS = 0.05
PARENT_CHECK_MILLISECONDS = 1000
"""Poll interval if no signal reports the parent's death."""
LEAF_REMOVAL_TRIES = 20
MAX_OOM_SCORE = 1000
"""Linux's maximum of oom_score_adj."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_RESET_IN_ENGINE = ("SIGINT", "SIGHUP", "SIGQUIT", "SIGTERM", "SIGCHLD", "SIGPIPE", "SIGXFSZ")


def process_table() -> Iterator[tuple[int, int, str]]:
    """Yields process id, parent id and state letter of every process, from /proc."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double this program's memory
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - as above
                # The program name may contain spaces and brackets.
                fields = file.read().rpartition(b")")[2].split()
                yield int(name), int(fields[1]), fields[0].decode()


def ps_table() -> Iterator[tuple[int, int, str]]:
    """Like `process_table`, from ps, for systems without /proc."""
    import subprocess  # noqa: PLC0415 - 2 MB that Linux does not need

    listing = subprocess.run(["/bin/ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, check=False, text=True)
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split()[:3]
        if int(parent) != os.getpid() or os.getpgid(0) != _group_of(int(pid)):  # not ps itself
            yield int(pid), int(parent), state


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return os.getpgid(0)


def descendants(root: int, table: Iterable[tuple[int, int, str]]) -> set[int]:
    """Returns the descendants of `root` in the table, excluding zombies."""
    children: dict[int, list[int]] = {}
    dead = set()
    for pid, parent, state in table:
        children.setdefault(parent, []).append(pid)
        if state[0] in "ZX":
            dead.add(pid)
    found: set[int] = set()
    unseen = [root]
    while unseen:
        fresh = [pid for pid in children.get(unseen.pop(), ()) if pid not in found]
        found.update(fresh)
        unseen += fresh
    return found - dead


class Guardian:
    """The guardian of one engine and its descendants."""

    def __init__(self, lifeline: int, runner: int, leaf: str, mode: str, memory_bytes: int, oom_score: int) -> None:
        self._lifeline = lifeline
        self._runner = runner
        self._leaf = leaf
        self._linux = mode == LINUX
        self._memory_bytes = memory_bytes
        self._oom_score = oom_score
        self._engine = 0
        self._is_end_reported = False
        self._reaped = False

    def run(self) -> None:
        """Starts the engine, waits for a reason to end it, and kills every descendant."""
        wake = self._prepare()
        command = self._read_command()
        if not command or not self._start(command):
            return
        self._wait(wake)
        left = self._kill_all()
        self._look_for_end()
        if not self._reaped:
            _reap(self._engine)
        if left:
            self._tell("left " + " ".join(str(pid) for pid in sorted(left)))
        if self._leaf and self._runner_is_gone():
            _remove_leaf(self._leaf)

    def _prepare(self) -> int:
        os.set_inheritable(self._lifeline, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        # A signal is not enough reason to end: when a whole service gets TERM, the runner ends the guardian. The signal
        # only wakes it to check.
        readable, writable = os.pipe()
        os.set_blocking(readable, False)
        os.set_blocking(writable, False)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        if self._linux:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        return readable

    def _read_command(self) -> list[bytes]:
        size = int.from_bytes(_read_exactly(self._lifeline, 4), "big")
        if not 0 < size <= MAX_COMMAND_BYTES:
            return []
        whole = _read_exactly(self._lifeline, size)
        return whole.split(b"\0") if len(whole) == size else []

    def _start(self, command: list[bytes]) -> bool:
        hears, says = os.pipe()
        guardian = os.getpid()
        try:
            self._engine = os.fork()
        except OSError as error:
            self._tell(f"failed {error.errno}")
            return False
        if self._engine == 0:
            self._become(command, guardian, says)
        os.close(says)
        # Closed by exec: data before the end of file is the error.
        entering, _, executing = _read_exactly(hears, 64).partition(b" ")
        os.close(hears)
        if executing:
            self._tell(f"failed {executing.decode()}")
            os.waitpid(self._engine, 0)
            return False
        _close_output()
        self._tell(f"started {self._engine} {entering.decode() or 0}")
        return True

    def _become(self, command: list[bytes], guardian: int, says: int) -> None:
        """Execs the engine, in the fork."""
        try:
            os.setsid()
            if self._linux:
                _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                _limit(self._memory_bytes, self._oom_score)
            if os.getppid() != guardian:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for name in _RESET_IN_ENGINE:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            if self._leaf:
                try:
                    _write(f"{self._leaf}/cgroup.procs", b"0")
                except OSError as error:
                    os.write(says, str(error.errno).encode())
            os.execvp(command[0], command)  # noqa: S606 - an argument list, no shell
        except OSError as error:
            os.write(says, f" {error.errno}".encode())
        finally:
            os._exit(127)

    def _wait(self, wake: int) -> None:
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while not (self._look_for_end() or self._runner_is_gone()):
            ready = {fd for fd, _ in poll.poll(None if self._linux else PARENT_CHECK_MILLISECONDS)}
            if self._lifeline in ready:
                return  # KILL_ALL, or the end of the runner
            with suppress(BlockingIOError):
                os.read(wake, 4096)
            self._reap_adopted()

    def _look_for_end(self) -> bool:
        """Whether the engine has ended; reports it to the runner once."""
        if self._is_end_reported:
            return True
        if self._linux:
            # Not reaped until the end, so that its id and its group's are not reused.
            end = os.waitid(os.P_PID, self._engine, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None:
                return False
            how = {os.CLD_EXITED: "exited", os.CLD_DUMPED: "dumped"}.get(end.si_code, "killed")
            number = end.si_status
        else:
            pid, status = os.waitpid(self._engine, os.WNOHANG)
            if pid == 0:
                return False
            self._reaped = True
            number = os.waitstatus_to_exitcode(status)
            how = "exited" if number >= 0 else "dumped" if os.WCOREDUMP(status) else "killed"
        self._tell(f"ended {how} {abs(number)}")
        self._is_end_reported = True
        return True

    def _runner_is_gone(self) -> bool:
        # Its files are closed a moment before its children are signalled.
        lifeline = select.poll()
        lifeline.register(self._lifeline, 0)  # only its end
        return os.getppid() != self._runner or bool(lifeline.poll(0))

    def _kill_all(self) -> set[int]:
        """Kills until no descendant is left; returns those that survive."""
        deadline = time.monotonic() + KILL_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            # Listed before the first kill: without a sub-reaper, a tree falls apart when its root dies.
            table = list(process_table() if self._linux else ps_table())
            alive = descendants(os.getpid(), table)
            if self._leaf:
                with suppress(OSError):
                    _write(f"{self._leaf}/cgroup.kill", b"1")
            if not self._reaped:
                with suppress(OSError):
                    os.killpg(self._engine, signal.SIGKILL)
            for pid in alive:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._look_for_end()
            for pid, parent, state in table:
                if parent == os.getpid() and pid != self._engine and state == "Z":
                    _reap(pid)
            if time.monotonic() > deadline or not (alive or self._has_children()):
                return alive
            time.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    def _has_children(self) -> bool:
        """Whether any descendant is left, reliably: a process may fork while the table is read.

        An orphan becomes a child of the guardian, so without a child there is no descendant. Reaps the engine.
        """
        if not self._linux:
            return False
        if self._is_end_reported and not self._reaped:
            _reap(self._engine)
            self._reaped = True
        try:
            self._reap_adopted()
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _reap_adopted(self) -> None:
        """Reaps orphans that became children of the guardian, but not the engine."""
        while self._linux:
            end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is None or end.si_pid == self._engine:
                return
            _reap(end.si_pid)

    def _tell(self, line: str) -> None:
        with suppress(OSError):  # the runner may have ended
            os.write(self._lifeline, f"{line}\n".encode())


def _reap(pid: int) -> None:
    with suppress(OSError):
        os.waitpid(pid, os.WNOHANG)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _limit(memory_bytes: int, oom_score: int) -> None:
    """Limits the memory of this process and its later children. A stricter existing limit stays."""
    if oom_score:
        with suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:  # noqa: PTH123 - as above
            score = min(int(file.read()) + oom_score, MAX_OOM_SCORE)
            file.seek(0)
            file.write(str(score))
    if memory_bytes:
        import resource  # noqa: PLC0415 - Windows lacks it, and imports this module

        # Not the address space: CUDA and garbage collectors reserve far more of it than they use.
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _read_exactly(fd: int, size: int) -> bytes:
    """Reads `size` bytes, fewer at the end of the file."""
    whole = b""
    while len(whole) < size and (chunk := os.read(fd, size - len(whole))):
        whole += chunk
    return whole


def _write(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)


def _close_output() -> None:
    """Closes the engine's output pipe here, since otherwise it would never reach end of file."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def _remove_leaf(path: str) -> None:
    for _ in range(LEAF_REMOVAL_TRIES):
        try:
            os.rmdir(path)  # noqa: PTH106 - pathlib would double this program's memory
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(MAX_PAUSE_SECONDS)
        else:
            return


def main() -> None:
    """Runs the guardian with the program's arguments."""
    lifeline, runner, leaf, mode, memory_bytes, oom_score = sys.argv[1:]
    Guardian(int(lifeline), int(runner), leaf, mode, int(memory_bytes), int(oom_score)).run()


if __name__ == "__main__":
    main()
