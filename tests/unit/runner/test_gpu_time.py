"""GPU time from a fake of NVIDIA's library: added up, and unknown where the library fails."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from kit.waiting import wait_until

from runner_svc.supervise.process_time import HANG_SECONDS, GpuTime

SECOND = 1_000_000


@dataclass(frozen=True)
class Sample:
    pid: int
    timeStamp: int  # noqa: N815 - NVML's name
    smUtil: int  # noqa: N815 - NVML's name


class StandIn:
    """The part of the `pynvml` module that is used."""

    NVML_ERROR_NOT_FOUND = 6

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self, gpus: int = 1) -> None:
        self.samples: dict[int, list[Sample]] = {number: [] for number in range(gpus)}
        self.errors: dict[int, Exception] = {}
        self.hang: threading.Event | None = None
        self.asked_since: list[int] = []

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's name
        if self.hang is not None:
            self.hang.wait(10.0)
        return len(self.samples)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802 - NVML's name
        return number

    def nvmlDeviceGetProcessUtilization(self, handle: int, since: int) -> list[Sample]:  # noqa: N802 - NVML's name
        self.asked_since.append(since)
        if handle in self.errors:
            raise self.errors[handle]
        found = [sample for sample in self.samples[handle] if sample.timeStamp > since]
        if not found:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return found


def _settled(gpu: GpuTime, *process_ids: int) -> float | None:
    gpu.seconds(process_ids)
    wait_until(lambda: gpu._reader is None or not gpu._reader.is_alive())
    return gpu._seconds


def test_usage_is_summed_over_processes_and_gpus() -> None:
    nvml = StandIn(gpus=2)
    gpu = GpuTime(lambda: nvml)
    nvml.samples = {0: [Sample(1, 10 * SECOND, 100)], 1: [Sample(9, 10 * SECOND, 100)]}
    assert _settled(gpu, 1, 2) == 0.0, "the first samples only tell NVML's time"
    nvml.samples[0] += [Sample(1, 11 * SECOND, 50), Sample(3, 11 * SECOND, 100), Sample(1, 12 * SECOND, 100)]
    nvml.samples[1] += [Sample(2, 12 * SECOND, 25)]
    assert _settled(gpu, 1, 2) == pytest.approx(0.5 + 1.0 + 2 * 0.25)
    assert _settled(gpu, 1, 2) == pytest.approx(2.0), "nothing new, nothing added"


def test_unused_gpu_is_zero_and_its_first_sample_is_not_a_lifetime_total() -> None:
    nvml = StandIn()
    gpu = GpuTime(lambda: nvml)
    assert _settled(gpu, 1) == 0.0
    nvml.samples[0] = [Sample(1, 1_700_000_000 * SECOND, 100)]
    assert _settled(gpu, 1) == 0.0


@pytest.mark.parametrize("error", [OSError("no libnvidia-ml"), ImportError("no pynvml"), RuntimeError("no driver")])
def test_missing_gpu_is_unknown_and_not_queried_again(error: Exception) -> None:
    tries = 0

    def load() -> Any:
        nonlocal tries
        tries += 1
        raise error

    gpu = GpuTime(load)
    assert [_settled(gpu, 1) for _ in range(3)] == [None] * 3
    assert tries == 1


def test_error_makes_usage_unknown_while_it_lasts() -> None:
    nvml = StandIn()
    gpu = GpuTime(lambda: nvml)
    nvml.errors[0] = StandIn.NVMLError(999)
    assert _settled(gpu, 1) is None
    nvml.errors.clear()
    assert _settled(gpu, 1) == 0.0


def test_gpu_without_figures_does_not_hide_the_use_of_others() -> None:
    """A long prefill beside an old display card counted as a stall: its engine used no processor time."""
    nvml = StandIn(gpus=2)
    gpu = GpuTime(lambda: nvml)
    nvml.errors[0] = StandIn.NVMLError(3)
    nvml.samples[1] = [Sample(1, 10 * SECOND, 100)]
    assert _settled(gpu, 1) == 0.0
    nvml.samples[1] += [Sample(1, 12 * SECOND, 50)]
    assert _settled(gpu, 1) == pytest.approx(1.0)


def test_hanging_library_blocks_no_caller_and_uses_only_one_thread() -> None:
    now = 100.0
    nvml = StandIn()
    gpu = GpuTime(lambda: nvml, lambda: now)
    assert _settled(gpu, 1) == 0.0
    nvml.hang = threading.Event()
    threads = threading.active_count()
    assert gpu.seconds([1]) == 0.0
    for _ in range(10):
        assert gpu.seconds([1]) == 0.0, "what was known stays known for a moment"
    assert threading.active_count() == threads + 1
    now += HANG_SECONDS
    assert gpu.seconds([1]) is None
    nvml.hang.set()
    wait_until(lambda: threading.active_count() == threads)
    assert gpu.seconds([1]) == 0.0, "known again"
