"""An instance whose files are pulled before its first load, stepped on a fake clock."""

import asyncio
from dataclasses import replace
from pathlib import Path

from instance_stage import StepBackend

from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import HibernationSettings, NoteFetch, ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock, let_all_run


class FetchStage:
    """An instance, the backend it has before its files are there, the one with them, and a pull that the test ends."""

    def __init__(self, *, start_asleep: bool = False) -> None:
        self.first, self.second = StepBackend(), StepBackend()
        self.second.loaded.set()
        self.pulls = 0
        self.cancelled = 0
        self.error: WeftError | None = None
        self.go = asyncio.Event()
        self.adopted = 0
        self.model = ServedModel(
            name="m",
            make_backend=lambda: self.first,
            slots=2,
            hibernation=HibernationSettings(start_asleep=start_asleep),
            fetch=self.fetch,
        )
        self.instance = Instance(self.model, self.first, FakeClock(), lambda: None)
        self.instance.on_adopted = self._note_adopted

    def _note_adopted(self) -> None:
        self.adopted += 1

    async def fetch(self, note: NoteFetch) -> ServedModel:
        self.pulls += 1
        note("pulling 1 GiB of 4 GiB", 0.25)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return replace(self.model, fetch=None, make_backend=lambda: self.second, model_path=Path("/m.gguf"))


async def test_load_reports_pull_progress_and_then_starts_the_engine_with_the_files() -> None:
    stage = FetchStage()
    await stage.instance.start()
    await let_all_run()
    assert stage.instance.phase.name == "LOADING"
    assert (stage.instance.load_stage, stage.instance.load_progress) == ("pulling 1 GiB of 4 GiB", 0.25)
    stage.go.set()
    await let_all_run()
    assert stage.instance.phase is Phase.READY
    assert (stage.first.starts, stage.second.starts) == (0, 1)
    assert stage.instance.backend is stage.second
    assert stage.instance.model_path == Path("/m.gguf")
    assert (stage.pulls, stage.adopted) == (1, 1)
    await stage.instance.stop()


async def test_pulled_files_are_not_pulled_again_after_a_crash_or_hibernation() -> None:
    stage = FetchStage()
    stage.go.set()
    await stage.instance.start()
    await let_all_run()
    stage.second.deaths.put_nowait("signal SIGKILL")
    await let_all_run()
    assert (stage.pulls, stage.second.starts) == (1, 2)
    await stage.instance.unload()
    await stage.instance.wake()
    assert (stage.pulls, stage.second.starts) == (1, 3)
    await stage.instance.stop()


async def test_deleted_files_are_pulled_again_before_the_next_load() -> None:
    stage = FetchStage()
    stage.go.set()
    present = True
    first = replace(stage.model, make_backend=lambda: stage.second, is_here=lambda: present)
    instance = Instance(first, stage.second, FakeClock(), lambda: None)
    await instance.start()
    await asyncio.wait_for(instance.wake(), 5.0)
    assert (stage.pulls, stage.second.starts) == (0, 1)
    await instance.unload()
    present = False
    await asyncio.wait_for(instance.wake(), 5.0)
    assert (stage.pulls, stage.second.starts) == (1, 2)
    await instance.stop()


async def test_failed_pull_is_not_a_restart_and_the_next_call_pulls_again() -> None:
    stage = FetchStage()
    stage.error = WeftError(Reason.NOT_FOUND, "the hub has no such repository")
    stage.go.set()
    await stage.instance.start()
    await let_all_run()
    assert stage.instance.phase.name == "HIBERNATING"
    assert "no such repository" in stage.instance.detail
    assert (stage.instance.restart_count, stage.pulls) == (0, 1)
    stage.error = None
    await stage.instance.wake()
    assert stage.instance.phase is Phase.READY
    assert stage.pulls == 2
    await stage.instance.stop()


async def test_unload_cancels_a_pull() -> None:
    stage = FetchStage()
    await stage.instance.start()
    await let_all_run()
    await stage.instance.unload()
    assert stage.cancelled == 1
    assert stage.instance.phase is Phase.HIBERNATING
    assert stage.instance.load_stage == ""
    await stage.instance.stop()


async def test_initially_hibernating_model_is_pulled_on_its_first_request() -> None:
    stage = FetchStage(start_asleep=True)
    await stage.instance.start()
    await let_all_run()
    assert stage.pulls == 0
    stage.go.set()
    await stage.instance.wake()
    assert stage.pulls == 1
    await stage.instance.stop()
