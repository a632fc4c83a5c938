"""A model that agents use is kept for the results of their tools."""

import math
from typing import Any

from scheduler_harness import Mesh, arrival, asleep, candidate, placed, scheduler, woken

from router_svc.loop import _served
from router_svc.policy.decisions import Served, Waits
from router_svc.policy.endpoints.candidates import HostMemory, MemoryHolder
from router_svc.policy.loading.tool_pauses import KEPT_RATIO, MAX_SESSIONS, PRIOR_SECONDS, ToolPauses
from router_svc.receipt_counts import ReceiptCounts
from weft.api.common.v1 import receipt_pb2
from weft.kernel.requests.request_values import Operation, Priority

GIB = 1 << 30
LOAD_SECONDS, TURN_SECONDS = 12.0, 20.0
ASKS_FOR_TOOLS = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100, awaits_tool_results=True)
ENDS = Served(prompt_tokens=100, cached_tokens=0, output_tokens=100)


def test_results_are_awaited_for_twice_as_long_as_tools_usually_take() -> None:
    pauses = ToolPauses()
    assert not pauses.is_awaited("m", LOAD_SECONDS, 0.0)
    pauses.begin("m", b"s", 10.0)
    assert pauses.is_awaited("m", LOAD_SECONDS, 9.9 + KEPT_RATIO * PRIOR_SECONDS)
    assert not pauses.is_awaited("m", LOAD_SECONDS, 10.0 + KEPT_RATIO * PRIOR_SECONDS)
    assert not pauses.is_awaited("other", LOAD_SECONDS, 10.0)
    assert not pauses.is_awaited("m", PRIOR_SECONDS, 10.0), "the tools take longer than half of a load"


def test_duration_of_tools_is_learned_from_the_sessions_that_return() -> None:
    pauses = ToolPauses()
    for number in range(100):
        pauses.begin("m", b"s", 10.0 * number)
        pauses.end(b"s", 10.0 * number + 1.0)
        pauses.end(b"another", 10.0 * number + 2.0)
    assert not pauses.is_awaited("m", LOAD_SECONDS, 1_000.0), "nobody is away"
    pauses.begin("m", b"s", 1_000.0)
    assert pauses.is_awaited("m", 2.5, 1_001.9)
    assert not pauses.is_awaited("m", LOAD_SECONDS, 1_002.5)


def test_pause_in_which_a_person_answered_is_not_learned() -> None:
    pauses = ToolPauses()
    pauses.begin("m", b"s", 0.0)
    pauses.end(b"s", 3_600.0)
    pauses.begin("m", b"s", 3_600.0)
    assert pauses.is_awaited("m", LOAD_SECONDS, 3_600.0)


def test_sessions_that_never_return_are_dropped() -> None:
    pauses = ToolPauses()
    for number in range(2 * MAX_SESSIONS):
        pauses.begin("m", b"%d" % number, number / 1e3)
    assert len(pauses._paused["m"]) == len(pauses._model_of) == MAX_SESSIONS
    pauses.forget("m")
    assert not pauses._model_of


def shown(mesh: Mesh, ready: str, now: float) -> list[Any]:
    on_host = {"host": "gpu", "memory_bytes": 5 * GIB, "usual_load_seconds": LOAD_SECONDS}
    members = [
        (candidate if model == ready else asleep)("run-" + model, model, **on_host) for model in ("agents", "chat")
    ]
    holder = MemoryHolder(name=ready, is_model=True, held_bytes=5 * GIB)
    host = HostMemory(host="gpu", total_bytes=8 * GIB, free_bytes=3 * GIB, holders=(holder,))
    return mesh.show(members, now, hosts={"gpu": host})


def mesh_after(answer: Served, *, at: float, session: bytes = b"s", **changes: Any) -> Mesh:
    """A mesh whose only loaded model gave an agent this answer."""
    mesh = scheduler()
    shown(mesh, "agents", 0.0)
    assert placed(mesh.submit(arrival(1, "agents", affinity_key=session, **changes), at - 1.0))
    mesh.report_first_content(1, at)
    mesh.finish(1, at, answer)
    return mesh


def wakes_at(mesh: Mesh, asked: float) -> float:
    """When the other model is woken for a chat."""
    if woken(mesh.submit(arrival(2, "chat", arrived_at=asked), asked)):
        return asked
    quarters = range(int(asked * 4), int(asked * 4) + 400)
    return next((quarter / 4 for quarter in quarters if woken(mesh.tick(quarter / 4))), math.inf)


def test_model_is_kept_for_an_agent_whose_tools_run() -> None:
    assert wakes_at(mesh_after(ASKS_FOR_TOOLS, at=3.0), 4.0) == 3.0 + KEPT_RATIO * PRIOR_SECONDS
    assert wakes_at(mesh_after(ENDS, at=3.0), 4.0) <= 5.0, "its work is done"
    assert wakes_at(mesh_after(ASKS_FOR_TOOLS, at=3.0, session=b""), 4.0) <= 5.0, "nobody knows when it returns"


def test_durable_task_whose_tools_run_keeps_no_model_from_callers() -> None:
    assert wakes_at(mesh_after(ASKS_FOR_TOOLS, at=3.0, priority=Priority.DURABLE), 4.0) <= 5.0


def test_agent_that_returned_no_longer_keeps_its_model_for_its_tools() -> None:
    mesh = mesh_after(ASKS_FOR_TOOLS, at=3.0)
    mesh.submit(arrival(3, "agents", affinity_key=b"s", arrived_at=4.0), 4.0)
    mesh.report_first_content(3, 5.0)
    mesh.finish(3, 5.0, ENDS)
    assert wakes_at(mesh, 6.0) <= 8.0


def test_agents_keep_a_model_no_longer_than_a_model_in_use() -> None:
    mesh, woken_at = mesh_after(ASKS_FOR_TOOLS, at=3.0), math.inf
    assert not woken(mesh.submit(arrival(2, "chat", arrived_at=4.0), 4.0))
    for second in range(5, 60):
        key, now = 10 + second, float(second)
        decisions = mesh.submit(arrival(key, "agents", affinity_key=b"s", arrived_at=now), now)
        decisions += mesh.report_first_content(key, now + 0.1)
        decisions += mesh.finish(key, now + 0.1, ASKS_FOR_TOOLS)
        if woken(decisions + mesh.tick(now + 0.5)):
            woken_at = now
            break
    assert TURN_SECONDS <= woken_at <= 4.0 + TURN_SECONDS


def test_waiting_request_is_told_that_an_agents_tools_run() -> None:
    decisions = mesh_after(ASKS_FOR_TOOLS, at=3.0).submit(arrival(2, "chat", arrived_at=4.0), 4.0)
    (waits,) = (each for each in decisions if isinstance(each, Waits))
    assert waits.reason == "VRAM: needs 5 GiB on gpu, held by agents for an agent whose tools run"


def test_receipt_says_whether_results_of_tools_are_awaited() -> None:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, awaits_tool_results=True)
    receipt.usage.prompt_tokens = 1
    served = _served(ReceiptCounts(receipt), Operation.CHAT)
    assert served is not None
    assert served.awaits_tool_results
