"""The use of its host that a runner reports, and the main memory of the host and of engines."""

from pathlib import Path

import psutil
import pytest
from kit.presence import present

from runner_svc.memory.machine_memory import MIN_HOST_RESERVE_BYTES, host_memory_bytes
from runner_svc.policy.host_memory import BYTES_PER_PROCESSOR, MARGIN_BYTES, configured_limit, host_memory_limit
from runner_svc.policy.memory_estimate import GIBIBYTE, MEBIBYTE, EstimateSource, MemoryEstimate
from runner_svc.session.host_meter import MEMORY_STEP_BYTES, SAMPLE_SECONDS, HostMeter
from weft_testing.fake_clock import FakeClock


async def test_use_of_the_host_is_sampled_every_ten_seconds_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = 100.0, 50.0
    times = type(psutil.cpu_times())
    fields = dict.fromkeys(times._fields, 0.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(**(fields | {"idle": idle, "user": busy})))
    clock = FakeClock()
    meter = HostMeter(clock)
    idle, busy = 107.9, 52.1
    use = meter.use()
    assert (use.cpu_utilization, use.cpu_count) == (0.2, psutil.cpu_count())
    assert 0 < use.memory_used_bytes <= use.memory_total_bytes
    assert use.memory_used_bytes % MEMORY_STEP_BYTES == 0
    busy = 60.0
    assert meter.use() == use
    await clock.advance(SAMPLE_SECONDS)
    assert meter.use().cpu_utilization == 1.0


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


NOWHERE = Path("/nonexistent")


def table(folder: Path, total_gib: float, available_gib: float) -> Path:
    file = folder / "meminfo"
    file.write_text(
        f"MemTotal:       {int(total_gib * MEBIBYTE)} kB\nMemFree: 12 kB\n"
        f"MemAvailable:   {int(available_gib * MEBIBYTE)} kB\nHugePages_Total:       0\n"
    )
    return file


def cgroup(folder: Path, limit: str, used: int, cached: int) -> Path:
    folder.mkdir()
    (folder / "cgroup.procs").write_text("1\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 17\nfile {cached}\nkernel 3\n")
    return folder


def test_host_memory_is_available_memory_minus_a_twentieth_of_the_total(tmp_path: Path) -> None:
    assert host_memory_bytes(table(tmp_path, 40, 30), NOWHERE) == 28 * GIBIBYTE


def test_small_host_keeps_a_fixed_reserve(tmp_path: Path) -> None:
    assert host_memory_bytes(table(tmp_path, 4, 3), NOWHERE) == 3 * GIBIBYTE - MIN_HOST_RESERVE_BYTES
    assert host_memory_bytes(table(tmp_path, 4, 0.1), NOWHERE) == 0


def test_container_and_parent_limits_apply_and_cached_files_count_as_available(tmp_path: Path) -> None:
    memory = table(tmp_path, 400, 300)
    outer = cgroup(tmp_path / "outer", str(20 * GIBIBYTE), 14 * GIBIBYTE, 4 * GIBIBYTE)
    inner = cgroup(outer / "inner", "max", 1 * GIBIBYTE, 0)
    assert host_memory_bytes(memory, inner) == 10 * GIBIBYTE - 1 * GIBIBYTE


def test_unreadable_host_memory_is_unknown(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path / "absent", NOWHERE) is None
    (tmp_path / "other").write_text("MemTotal: many kB\n")
    assert host_memory_bytes(tmp_path / "other", NOWHERE) is None


def test_memory_of_this_machine_is_read() -> None:
    found = present(host_memory_bytes())
    assert found < 1024 * GIBIBYTE
