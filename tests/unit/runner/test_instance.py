"""An instance keeps its backend running, stepped on a fake clock."""

from contextlib import ExitStack

import pytest
from instance_stage import Stage, living

from runner_svc.policy.lifecycle import Phase
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


async def test_every_lifecycle_phase_is_reported_immediately() -> None:
    async with living(loads=False) as stage:
        stage.backend.loaded.set()
        await stage.settle()
        assert stage.instance.loader.context_tokens == 512
        await stage.die()
    told = [Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.IDLE]
    assert stage.told == told
    assert stage.instance.restart_log.last_detail == "signal SIGKILL"
    assert stage.instance.restart_count == 1


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("loading", Reason.BACKEND_NOT_READY),
        ("draining", Reason.SHUTTING_DOWN),
        ("full", Reason.NO_SLOT_AVAILABLE),
    ],
)
async def test_refused_request_has_the_reason(prepare: str, reason: Reason) -> None:
    stage = Stage()
    await stage.instance.start()
    if prepare != "loading":
        stage.backend.loaded.set()
    await stage.settle()
    if prepare == "draining":
        stage.instance.drain()
    with ExitStack() as held:
        for request in ("r1", "r2") if prepare == "full" else ():
            held.enter_context(stage.instance.admit(request))
        with pytest.raises(WeftError) as refused, stage.instance.admit("r3"):
            pass
    assert refused.value.reason is reason
    await stage.instance.stop()


async def test_stop_ends_the_backend_in_any_state_and_is_idempotent() -> None:
    stage = Stage()
    await stage.instance.start()
    await stage.settle()
    await stage.instance.stop()
    await stage.instance.stop()
    assert stage.backend.stops == 1
    assert stage.instance.phase is Phase.IDLE
