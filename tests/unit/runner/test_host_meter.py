"""The use of its host that a runner reports, and the main memory of the host and of engines."""

import psutil
import pytest

from runner_svc.memory.machine_memory import MIN_HOST_RESERVE_BYTES, host_memory_bytes
from runner_svc.policy.host_memory import BYTES_PER_PROCESSOR, MARGIN_BYTES, configured_limit, host_memory_limit
from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE, EstimateSource, MemoryEstimate
from runner_svc.session import host_meter
from runner_svc.session.host_meter import MEMORY_STEP_BYTES, SAMPLE_SECONDS, HostMeter
from weft.kernel.machine.machine_limits import UsableMemory, usable_processors
from weft_testing.fake_clock import FakeClock


async def test_use_of_the_host_is_sampled_every_ten_seconds_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = 100.0, 50.0
    times = type(psutil.cpu_times())
    fields = dict.fromkeys(times._fields, 0.0)
    monkeypatch.setattr(host_meter, "busy_seconds", lambda: None)  # no quota
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(**(fields | {"idle": idle, "user": busy})))
    clock = FakeClock()
    meter = HostMeter(clock)
    idle, busy = 107.9, 52.1
    use = meter.use()
    assert (use.cpu_utilization, use.cpu_count) == (0.2, usable_processors())
    assert 0 < use.memory_used_bytes <= use.memory_total_bytes
    assert use.memory_used_bytes % MEMORY_STEP_BYTES == 0
    busy = 60.0
    assert meter.use() == use
    await clock.advance(SAMPLE_SECONDS)
    assert meter.use().cpu_utilization == 1.0


async def test_use_of_a_container_with_a_quota_is_the_share_of_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 40.0
    monkeypatch.setattr(host_meter, "busy_seconds", lambda: used)
    monkeypatch.setattr(host_meter, "usable_processors", lambda: 2)
    clock = FakeClock()
    meter = HostMeter(clock)
    await clock.advance(SAMPLE_SECONDS)
    used += SAMPLE_SECONDS
    assert (meter.use().cpu_utilization, meter.use().cpu_count) == (0.5, 2)


def _estimate(size: int) -> MemoryEstimate:
    return MemoryEstimate(bytes=size, source=EstimateSource.HEADER)


@pytest.mark.parametrize(
    ("expected", "machine", "limit"),
    [
        (_estimate(GIBIBYTE), 24 * GIBIBYTE, 2 * GIBIBYTE + MARGIN_BYTES + 2 * BYTES_PER_PROCESSOR),
        (_estimate(GIBIBYTE), 3 * GIBIBYTE, 3 * GIBIBYTE),
        (_estimate(0), 3 * GIBIBYTE, 3 * GIBIBYTE),
        (None, 3 * GIBIBYTE, 3 * GIBIBYTE),
        (None, None, None),
    ],
)
def test_engine_memory_limit_is_its_estimate_plus_a_margin_and_below_the_machine_total(
    expected: MemoryEstimate | None, machine: int | None, limit: int | None
) -> None:
    assert host_memory_limit(expected, machine, processors=2) == limit


def test_model_setting_overrides_the_memory_limit_and_0_removes_it() -> None:
    assert configured_limit(None, GIBIBYTE) == GIBIBYTE
    assert configured_limit(10, GIBIBYTE) == 10 * MEBIBYTE
    assert configured_limit(0, GIBIBYTE) is None


def test_host_memory_is_available_memory_minus_a_twentieth_of_the_total() -> None:
    usable = UsableMemory(total_bytes=40 * GIBIBYTE, available_bytes=30 * GIBIBYTE)
    assert host_memory_bytes(usable) == 28 * GIBIBYTE


@pytest.mark.parametrize(("available", "left"), [(3 * GIBIBYTE, 3 * GIBIBYTE - MIN_HOST_RESERVE_BYTES), (MEBIBYTE, 0)])
def test_small_host_keeps_a_fixed_reserve(available: int, left: int) -> None:
    assert host_memory_bytes(UsableMemory(total_bytes=4 * GIBIBYTE, available_bytes=available)) == left


def test_memory_of_this_machine_is_read() -> None:
    assert host_memory_bytes() < 1024 * GIBIBYTE
