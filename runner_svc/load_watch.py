"""A load as its caller follows it: how far it is, then what came of it."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from runner_svc.instance import Instance
from runner_svc.load_messages import duration_message
from runner_svc.policy.load_plan import LoadWish
from runner_svc.policy.phase import Phase
from runner_svc.waiting import end_tasks
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.clock import Clock

LOOK_SECONDS = 0.25
"""How often a caller is told how far a load is, where that has changed."""


async def follow_load(
    instance: Instance, wish: LoadWish, clock: Clock, tellable: Callable[[str], str]
) -> AsyncGenerator[pb.LoadResponse]:
    """Load a model and tell how far it is; the result comes last. Closing it leaves the load, see Instance.load."""
    began = clock.monotonic()
    loading = asyncio.create_task(instance.load(wish))
    told = pb.LoadProgress()
    try:
        while not loading.done():
            progress = _progress(instance, tellable)
            if progress != told and instance.phase is not Phase.READY:
                told = progress
                yield pb.LoadResponse(progress=progress)
            timer = asyncio.create_task(clock.sleep(LOOK_SECONDS))
            await asyncio.wait({loading, timer}, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks(timer)
        yield pb.LoadResponse(
            result=_result(instance, was_loaded=loading.result(), load_seconds=clock.monotonic() - began)
        )
    finally:
        await end_tasks(loading)


def _progress(instance: Instance, tellable: Callable[[str], str]) -> pb.LoadProgress:
    stage = instance.load_stage or instance.phase.name.lower()
    progress = pb.LoadProgress(
        stage=stage,
        detail=tellable(instance.detail).removeprefix(f"{stage}: "),
        progress=instance.load_progress,
    )
    eta_seconds = instance.load_eta_seconds
    if eta_seconds is not None:
        # In whole seconds: a caller is told what changes, not that time passes.
        progress.eta.CopyFrom(duration_message(float(round(eta_seconds))))
    return progress


def _result(instance: Instance, *, was_loaded: bool, load_seconds: float) -> pb.LoadResult:
    return pb.LoadResult(
        memory_bytes=instance.memory.held_bytes,
        memory_measured=instance.memory.seen_bytes is not None,
        load_time=duration_message(0.0 if was_loaded else load_seconds),
        was_loaded=was_loaded,
    )
