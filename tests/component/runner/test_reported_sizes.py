"""Forecasts are reported before any load, without waiting for files that take long to read."""

import asyncio
from pathlib import Path

import pytest
from kit.engines import fake_model
from runner_harness import running_runner

from runner_svc import runner_service as service
from runner_svc.instance.instance_settings import HibernationSettings, ServedModel
from runner_svc.memory.port import MemoryForecast
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate

SIZE_BYTES = 5 << 30
REPORT_INTERVAL_SECONDS = 5.0
"""Report interval of the harness's registry: immediate reports arrive sooner."""


class _LateForecast(MemoryForecast):
    def __init__(self, known: asyncio.Event) -> None:
        self._known = known

    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        await self._known.wait()
        return MemoryEstimate(bytes=SIZE_BYTES, source=EstimateSource.MANIFEST)


def _asleep(name: str, known: asyncio.Event) -> ServedModel:
    return fake_model(
        name,
        hibernation=HibernationSettings(start_asleep=True),
        model_path=Path(__file__),
        forecast=_LateForecast(known),
    )


async def test_sizes_are_reported_as_soon_as_known_even_while_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that knew no size began loads without asking whether there was room, for seconds after each start."""

    async def never_ends(_path: Path, _memory: Path) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(service, "model_digest", never_ends)
    known = asyncio.Event()
    async with running_runner(tmp_path, [_asleep("first", known), _asleep("second", known)]) as runner:
        before = await runner.until(Phase.HIBERNATING, "second")
        assert before.memory.estimated_bytes == 0
        beats_before = len(runner.registry.beats)
        known.set()
        for name in ("first", "second"):
            state = await runner.until_state(lambda state: state.memory.estimated_bytes > 0, name)
            assert state.memory.estimated_bytes == SIZE_BYTES
        told_after = runner.registry.beat_times[-1] - runner.registry.beat_times[beats_before - 1]
        assert told_after < REPORT_INTERVAL_SECONDS, "the next report would have said it anyhow"
