"""Memory, descriptors, threads and disk of a mesh over a run, and whether they grow."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression

import psutil

from tools.torture.checker import Violation
from tools.torture.mesh import Mesh, children

SAMPLE_SECONDS = 5.0
WARM_UP_SHARE = 0.25
"""Share of a run in which caches fill, and which is not judged."""
MIN_SAMPLES = 10
MAX_GROWTH = 0.1
"""Maximum growth over the judged part of a run, as a share of the mean."""
_WRITTEN = re.compile(r"^Anonymous: +(\d+) kB$", re.MULTILINE)
TASK_BYTES = 32_768
"""Maximum growth of the disk per task: each is kept with its request, its answer, and its lines in logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the services and engines of a mesh use, in a moment in which all of them run."""

    seconds: float
    """Since the start of the run."""
    processes: int
    memory_bytes: int
    """See `written_bytes`."""
    descriptors: int
    threads: int
    disk_bytes: int
    tasks: int
    """Acknowledged so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The slope of one figure over the judged part of a run."""

    name: str
    mean: float
    per_hour: float
    share: float
    """Growth over the judged part, relative to the mean."""
    is_flat: bool

    def __str__(self) -> str:
        state = "flat" if self.is_flat else "GROWS"
        return (
            f"{self.name} {state}: mean {self.mean:,.0f}, {self.per_hour:+,.0f} per hour ({self.share:+.1%} in the run)"
        )


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Returns the growth of each figure by linear regression; empty for too few samples.

    The disk is judged by its growth per task, because tasks are kept.
    """
    judged = [sample for sample in samples if sample.seconds >= WARM_UP_SHARE * samples[-1].seconds]
    if len(judged) < MIN_SAMPLES:
        return []
    moments = [sample.seconds for sample in judged]
    found = [
        _growth(name, moments, [float(getattr(sample, name)) for sample in judged])
        for name in ("memory_bytes", "descriptors", "threads")
    ]
    tasks, disk = [float(sample.tasks) for sample in judged], [float(sample.disk_bytes) for sample in judged]
    per_task = linear_regression(tasks, disk).slope if len(set(tasks)) > 1 else 0.0
    grown = _growth("disk_bytes", moments, disk)
    return [
        *found,
        Growth(
            name=f"disk ({per_task:,.0f} bytes per task)",
            mean=grown.mean,
            per_hour=grown.per_hour,
            share=grown.share,
            is_flat=per_task <= TASK_BYTES,
        ),
    ]


def _growth(name: str, moments: Sequence[float], values: Sequence[float]) -> Growth:
    slope, mean = linear_regression(moments, values).slope, fmean(values)
    share = slope * (moments[-1] - moments[0]) / max(mean, 1.0)
    return Growth(name=name, mean=mean, per_hour=slope * 3600, share=share, is_flat=share <= MAX_GROWTH)


def grown(found: Iterable[Growth]) -> list[Violation]:
    """Returns a violation for each figure that grows."""
    return [Violation("growth", "-", str(each)) for each in found if not each.is_flat]


def written_bytes(pid: int) -> int:
    """Returns the resident memory of a process that no file backs.

    A mapped model file is no part of it: it would be memory of this process once no other one on the machine maps it.
    """
    (found,) = _WRITTEN.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(found) * 1024


class Recorder:
    """Takes a sample every SAMPLE_SECONDS, and writes it to a file."""

    def __init__(self, mesh: Mesh, home: Path, file: Path, tasks: Callable[[], int]) -> None:
        """`home`: the folder whose files count. `tasks`: returns the number of acknowledged tasks."""
        self._mesh = mesh
        self._home = home
        self._file = file
        self._tasks = tasks
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Runs until it is cancelled. Moments in which a service is down are skipped. Raises OSError."""
        with self._file.open("w", encoding="utf-8") as file:
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                sample = await asyncio.to_thread(self._sample)
                if sample is not None:
                    self.samples.append(sample)
                    file.write(json.dumps(asdict(sample)) + "\n")
                    file.flush()

    def _sample(self) -> Sample | None:
        services = self._mesh.services
        if not all(service.serves for service in services):
            return None
        pids = [service.pid for service in services if service.pid]
        family = [*map(psutil.Process, pids), *(child for pid in pids for child in children(pid))]
        memory, descriptors, threads = 0, 0, 0
        with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
            for process in family:
                memory += written_bytes(process.pid)
                descriptors += process.num_fds()
                threads += process.num_threads()
            return Sample(
                seconds=time.monotonic() - self._began,
                processes=len(family),
                memory_bytes=memory,
                descriptors=descriptors,
                threads=threads,
                disk_bytes=sum(path.stat().st_size for path in self._home.rglob("*") if path.is_file()),
                tasks=self._tasks(),
            )
        return None
