"""What an instance does with its idle engine before it ends it."""

import asyncio

from instance_stage import Stage, living

from runner_svc.instance.lifecycle_loop import BEFORE_END_SECONDS
from runner_svc.policy.lifecycle import Phase
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class _Work:
    """Notes how often the engine had been stopped when it ran."""

    def __init__(self, stage: Stage, error: Exception | None = None) -> None:
        self.at_stops: list[int] = []
        self._stage = stage
        self._error = error
        stage.instance.set_before_end(self._run)

    async def _run(self) -> None:
        self.at_stops.append(self._stage.backend.stops)
        if self._error is not None:
            raise self._error


async def _never_done() -> None:
    await asyncio.Event().wait()


async def test_unload_puts_prompts_away_before_it_stops_the_engine() -> None:
    async with living() as stage:
        work, stops = _Work(stage), stage.backend.stops
        await stage.instance.unload()
        assert (work.at_stops, stage.backend.stops) == ([stops], stops + 1)


async def test_end_of_the_runner_puts_prompts_away_before_it_stops_the_engine() -> None:
    async with living() as stage:
        work, stops = _Work(stage), stage.backend.stops
    assert work.at_stops == [stops]


async def test_end_of_the_runner_puts_nothing_away_for_an_unloaded_model() -> None:
    async with living() as stage:
        work = _Work(stage)
        await stage.instance.unload()
    assert len(work.at_stops) == 1


async def test_nothing_is_put_away_from_an_engine_that_died() -> None:
    async with living() as stage:
        work = _Work(stage)
        await stage.die("killed")
        assert stage.instance.phase is not Phase.HIBERNATING
        assert work.at_stops == []


async def test_failed_storing_does_not_prevent_an_unload() -> None:
    async with living() as stage:
        _Work(stage, WeftError(Reason.BACKEND_ERROR, "no"))
        await stage.instance.unload()
        assert stage.instance.phase is Phase.HIBERNATING


async def test_slow_storing_delays_an_unload_by_its_limit_only() -> None:
    async with living() as stage:
        stage.instance.set_before_end(_never_done)
        unloading = await stage.begin(stage.instance.unload())
        await stage.clock.advance(BEFORE_END_SECONDS - 0.1)
        assert not unloading.done()
        await stage.clock.advance(0.2)
        await unloading
        assert stage.instance.phase is Phase.HIBERNATING
