"""A receipt says whether results of the caller's tools are awaited."""

import pytest
from chat_stage import STOP, TOOL_CALLS, ScriptedWork, call, end, events_of, request, text, user

from weft.api.common.v1 import chat_pb2

MINE = chat_pb2.Tool(function=chat_pb2.FunctionTool(name="mine"))


@pytest.mark.parametrize("signals", [[], ["LOW_CONFIDENCE"]], ids=["as the engine sends it", "with tools of the mesh"])
async def test_receipt_says_whether_results_of_the_callers_tools_are_awaited(signals: list[str]) -> None:
    payload = chat_pb2.ChatPayload(messages=[user()], tools=[MINE])
    called = await events_of(ScriptedWork([*call("mine"), *end(TOOL_CALLS)]), request(payload, signals=signals))
    assert called[-1].finished.receipt.awaits_tool_results
    answered = await events_of(ScriptedWork([text("Done."), *end(STOP)]), request(payload, signals=signals))
    assert not answered[-1].finished.receipt.awaits_tool_results
