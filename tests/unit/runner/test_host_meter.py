"""The use of its host that a runner reports."""

import psutil
import pytest

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
