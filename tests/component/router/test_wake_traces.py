"""The spans of wakes that waiting requests cause, as a collector gets them."""

from pathlib import Path

import pytest
from kit.traces import collected
from waker_harness import MODEL, RUNNER, WakingMesh, grant_of, next_word, refusal_of, waking_mesh

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.placement import Placement
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.tracing import Sampling, TraceContext
from weft_testing.fake_clock import let_all_run

NO_SHARE = Sampling(ratio=0.0)
REQUEST = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
LATER = TraceContext(0x1AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203332, True)


async def wakes(mesh: WakingMesh, place: Placement) -> None:
    """Return once the runner was asked to wake the model for a request."""
    assert (await next_word(place)).HasField("loading")
    assert await mesh.runner.asked() == MODEL


async def ended(mesh: WakingMesh) -> None:
    """Return once the end of the wake was reported."""
    await mesh.until_no_wake_is_under_way()
    await let_all_run()


async def test_wake_starts_its_own_trace_linked_to_its_request(tmp_path: Path) -> None:
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place("r1", REQUEST.traceparent) as place, mesh.place("r2", LATER.traceparent) as other:
                await wakes(mesh, place)
                assert (await next_word(other)).HasField("loading")
                await mesh.clock.advance(7.0)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
                await grant_of(other)
            await ended(mesh)
            (wake,) = spans.named("weft.wake")
        assert (wake.service, wake.parent_id, wake.is_error) == ("weft-router", "", False)
        assert wake.links == ((f"{REQUEST.trace_id:032x}", f"{REQUEST.span_id:016x}"),)
        assert wake.trace_id not in {f"{REQUEST.trace_id:032x}", f"{LATER.trace_id:032x}"}
        assert (wake.end - wake.start) / 1e9 == pytest.approx(7.0)
        assert wake.attributes["weft.wake.reason"]
        assert {name: value for name, value in wake.attributes.items() if name != "weft.wake.reason"} == {
            "gen_ai.request.model": MODEL,
            "weft.runner": RUNNER,
            "host.name": "here",
            "weft.priority": "normal",
            "weft.outcome": "succeeded",
        }


async def test_failed_wake_of_an_unsampled_request_is_recorded_and_a_successful_one_is_not(tmp_path: Path) -> None:
    unsampled = TraceContext(REQUEST.trace_id, REQUEST.span_id, False).traceparent
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place("r1", unsampled) as place:
                await wakes(mesh, place)
                mesh.runner.answer(WeftError(Reason.WAKE_FAILED, "exit code 3"))
                await refusal_of(place)
            assert [(span.attributes["error.type"], span.is_error) for span in spans.all()] == [("wake_failed", True)]
            async with mesh.place("r2", unsampled) as place:
                await wakes(mesh, place)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
            await ended(mesh)
            assert len(spans.all()) == 1


async def test_slow_wake_is_recorded(tmp_path: Path) -> None:
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place() as place:
                await wakes(mesh, place)
                await mesh.clock.advance(31.0)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
            await ended(mesh)
            assert [(span.name, span.links) for span in spans.all()] == [("weft.wake", ())]
