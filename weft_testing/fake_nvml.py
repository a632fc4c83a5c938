"""Fake graphics cards: a library in C (`fake_nvml.c`) that `pynvml` loads instead of NVIDIA's.

cards = FakeCards(folder)
cards.add(total_bytes=8 * 1024**3)
program = subprocess.Popen(..., env={**os.environ, **cards.environment(fake_nvml_library())})

That program and its descendants see the cards of `cards`. The library reads these files in the folder:

    devices           a line per card: uuid, bytes, name; 0 bytes: a card that reports no memory
    buses             a line per card: its place on the PCI bus; default: in the order of `devices`
    held/PID.CARD     bytes that a process holds on a card, and its start time in clock ticks; ignored once it is dead
    held/PID.CARD.N   the same for part N of a card in MIG mode
    reserved_bytes    memory of each card that the driver reserves
    utilization       a line per card: percent; missing: not supported
    power             a line per card: milliwatts; missing: not supported
    energy            a line per card: millijoules since the driver was loaded; missing: not supported
    samples           lines "pid microseconds percent": the GPU time of processes

and switches, which are files that exist or not: see SWITCHES.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from weft.gpu.process import is_alive, process_id_of
from weft.gpu.snapshot import ProcessId
from weft_testing.shared_library import built_once

LIBRARY_NAME = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("fake_nvml.c")
FOLDER_VARIABLE = "FAKE_NVML_DIR"
SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "fail": "every call fails",
        "no_driver": "every call says that the driver is not loaded",
        "no_process_memory": "processes are listed, how much they hold is not",
        "no_process_lists": "processes are not listed: not supported",
        "hidden_processes": "no process is listed, as in a container",
        "foreign_pids": "processes are listed under numbers that nobody has here",
        "graphics": "processes are on the list of those that draw, too",
    }
)


class OutOfCardMemoryError(Exception):
    """A card lacks free memory for an allocation: something was reserved twice."""


class FakeCards:
    """The cards of a fake host. Several processes may use a folder concurrently."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "held").mkdir(parents=True, exist_ok=True)

    def environment(self, library: Path) -> dict[str, str]:
        """Returns environment variables that show these cards to a program; `library` is from `fake_nvml_library`."""
        return {FOLDER_VARIABLE: str(self.folder), "LD_LIBRARY_PATH": str(library.parent)}

    def add(self, *, total_bytes: int, name: str = "Fake Card", uuid: str | None = None) -> int:
        """Adds a card; returns its number."""
        number = len(self._lines("devices"))
        with (self.folder / "devices").open("a", encoding="utf-8") as devices:
            devices.write(f"{uuid or f'GPU-fake-{number}'} {total_bytes} {name}\n")
        return number

    def write(self, name: str, *lines: object) -> None:
        """Writes one of the files atomically."""
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        temporary.replace(path)

    def switch(self, name: str, *, on: bool) -> None:
        """Turns one of SWITCHES on or off."""
        assert name in SWITCHES
        if on:
            self.write(name)
        else:
            (self.folder / name).unlink(missing_ok=True)

    def total_bytes(self) -> list[int]:
        """Returns the size of each card."""
        return [int(line.split()[1]) for line in self._lines("devices")]

    def card_at(self, bus_index: int) -> int:
        """Returns the number of the `bus_index`-th card on the PCI bus, which is CUDA's order with PCI_BUS_ID."""
        buses = [int(line) for line in self._lines("buses")] or list(range(len(self.total_bytes())))
        return sorted(range(len(buses)), key=buses.__getitem__)[bus_index]

    def hold(self, process: ProcessId, card: int, amount: int, *, part: int | None = None) -> None:
        """Lets a process hold memory on a card, even beyond its size; 0 frees it."""
        name = f"held/{process.pid}.{card}" + (f".{part}" if part is not None else "")
        if amount:
            self.write(name, f"{amount} {process.start_ticks}")
        else:
            (self.folder / name).unlink(missing_ok=True)

    def held_bytes(self) -> list[int]:
        """Returns each card's memory held by living processes."""
        sums = [0] * len(self.total_bytes())
        for card, amount in self._living():
            sums[card] += amount
        return sums

    def free_bytes(self) -> list[int]:
        """Returns each card's free memory."""
        reserved = sum(int(line) for line in self._lines("reserved_bytes"))
        return [total - held - reserved for total, held in zip(self.total_bytes(), self.held_bytes(), strict=True)]

    def take(self, pid: int, amounts: Sequence[tuple[int, int]]) -> None:
        """Allocates (card, bytes) for a process, all or nothing. Raises OutOfCardMemoryError."""
        process = process_id_of(pid)
        assert process is not None
        with self._alone():
            free = self.free_bytes()
            for card, amount in amounts:
                if amount > free[card]:
                    raise OutOfCardMemoryError(f"card {card} has {free[card]} bytes free, {amount} are asked for")
            for card, amount in amounts:
                self.hold(process, card, amount)

    def _living(self) -> Iterator[tuple[int, int]]:
        for path in (self.folder / "held").iterdir():
            if path.name.startswith("."):
                continue
            try:
                words = path.read_text("utf-8").split()
            except FileNotFoundError:
                continue
            pid, card = (int(number) for number in path.name.split(".")[:2])
            process = ProcessId(pid, int(words[1])) if len(words) > 1 else process_id_of(pid)
            if process is not None and is_alive(process):
                yield card, int(words[0])

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text("utf-8").splitlines() if path.exists() else []

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the folder across processes: like the real driver, never allocates a byte twice."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def fake_nvml_library() -> Path:
    """Returns the library's path in a folder for LD_LIBRARY_PATH. Raises as `built_once`."""
    return built_once(_SOURCE, LIBRARY_NAME)
