"""Web search over a real dispatcher: what is reported of each pass."""

from pathlib import Path
from typing import Any

import pytest
from gateway_script import FixedFleet, Step, model
from mesh_script import AnsweringRunner, dispatching
from search_stage import SEARCH, FakeSearXng, called, said, searching
from test_search_messages import PLAIN, WEATHER, message_of

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.dispatcher import Dispatcher
from weft.kernel.errors.reasons import Reason

FLEET = FixedFleet.of(model("tiny"))


def in_turn(runner: AnsweringRunner, *passes: list[Step]) -> None:
    """Has each pass answered by the next script."""
    scripts = iter(passes)

    class Asked(list[Any]):
        def append(self, request: Any) -> None:
            super().append(request)
            runner.steps = next(scripts)

    runner.asked = Asked()


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Reason, receipt_pb2.Receipt]]:
    """What the dispatcher reports to the scheduler."""
    found: list[tuple[Reason, receipt_pb2.Receipt]] = []

    async def report(_self: object, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        found.append((reason, receipt or receipt_pb2.Receipt()))
        return True

    monkeypatch.setattr("mesh_script.GrantingScheduler.report_finished", report)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_each_pass_is_reported_with_the_searches_until_its_end(
    tmp_path: Path, reported: list[tuple[Reason, receipt_pb2.Receipt]], stream: bool
) -> None:
    async with dispatching(tmp_path, FLEET) as (dispatcher, scheduler, runner):
        in_turn(runner, called("a"), called("b"), said("ok"))
        async with searching(dispatcher, fleet=FLEET) as (gateway, service):
            answer = await message_of(gateway, stream=stream, messages=PLAIN, tools=[SEARCH, WEATHER])
    assert [len(receipt.tool_runs) for _, receipt in reported] == [1, 2, 2]
    assert {receipt.request_id for _, receipt in reported} == {request.request_id for request in scheduler.placed}
    assert all(receipt.left_premises for _, receipt in reported)
    assert {run.host for run in reported[-1][1].tool_runs} == {service.asked[0].host}
    assert (answer["usage"]["output_tokens"], answer["content"][-1]["text"]) == (10, "ok")


async def test_pass_that_fails_after_a_search_lists_it(
    tmp_path: Path, reported: list[tuple[Reason, receipt_pb2.Receipt]]
) -> None:
    async with dispatching(tmp_path, FLEET) as (dispatcher, _, runner):
        # Its answer has begun, so that it is not tried again.
        in_turn(runner, called("a"), said("half")[:2])
        async with searching(dispatcher, FakeSearXng(status=500), fleet=FLEET) as (gateway, _):
            body = {"model": "tiny", "max_tokens": 50, "messages": PLAIN, "tools": [SEARCH, WEATHER]}
            answer = await gateway.request("POST", "/v1/messages", body)
    assert answer.status >= 500
    assert reported[-1][0] is not Reason.UNSPECIFIED
    assert [run.failed for run in reported[-1][1].tool_runs] == [True]
    assert isinstance(dispatcher, Dispatcher)
