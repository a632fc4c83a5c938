"""Invariants of an answer: it ends once, repeats no event, and hides calls for the mesh."""

import asyncio
from collections.abc import Coroutine

from chat_stage import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    Event,
    ScriptedWork,
    call,
    end,
    events_of,
    request,
    setup,
    text,
    thought,
    user,
)
from hypothesis import given
from hypothesis import strategies as st

from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

ITERATIONS = 2
UNSURE = '{"reason": "x"}'
DECISION = '{"question": "x", "options": ["a", "b"]}'
WRITTEN = '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'

_PIECES = st.sampled_from(
    [
        [text("Hello. ")],
        [thought("Hm. ")],
        [text(WRITTEN)],
        [text(WRITTEN[:20])],
        [text('{"name": "search", "arguments": {"q": "x"}}')],
        call("search", '{"q": "x"}'),
        call("search", '{"q": 1}'),
        call("mine"),
        call("LOW_CONFIDENCE", UNSURE),
        call("NEEDS_MANAGER_DECISION", DECISION),
        call("unknown"),
    ]
)


@st.composite
def _turn(draw: st.DrawFn) -> list[Frame]:
    frames: list[Frame] = []
    for index, piece in enumerate(draw(st.lists(_PIECES, max_size=4))):
        for frame in piece:
            copied = [Event.FromString(event.SerializeToString()) for event in frame]
            for event in copied:
                for part in event.delta.tool_calls:
                    part.index = index
                    part.id = part.id and f"call_{index}"
            frames.append(copied)
    return frames + end(draw(st.sampled_from([STOP, TOOL_CALLS, LENGTH])))


async def _outcome(answering: Coroutine[None, None, list[Event]]) -> list[Event] | WeftError:
    try:
        return await answering
    except WeftError as error:
        return error


@given(turns=st.lists(_turn(), min_size=ITERATIONS + 2, max_size=ITERATIONS + 2), has_tool=st.booleans())
def test_answer_ends_once_and_hides_mesh_tool_calls(turns: list[list[Frame]], has_tool: bool) -> None:
    mine = [chat_pb2.Tool(function=chat_pb2.FunctionTool(name="mine"))] if has_tool else []
    payload = chat_pb2.ChatPayload(messages=[user()], tools=mine)
    asked = request(
        payload,
        tools=["search"],
        signals=["LOW_CONFIDENCE", "NEEDS_MANAGER_DECISION"],
        max_tool_iterations=ITERATIONS,
    )
    work = ScriptedWork(*turns)
    outcome = asyncio.run(_outcome(events_of(work, asked, setup())))
    if isinstance(outcome, WeftError):
        assert outcome.reason is Reason.TOOL_CALL_INVALID
        return
    events = outcome
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[-2:] == ["usage", "finished"]
    assert (kinds.count("usage"), kinds.count("finished")) == (1, 1)
    assert sum(bool(event.delta.finish_reason) for event in events) == 1
    assert events[-3].delta.finish_reason
    assert kinds.count("tool_call") == kinds.count("tool_result") == events[-1].finished.receipt.tool_run_count
    named = {part.name for event in events for part in event.delta.tool_calls if part.name}
    assert named <= {"mine", "unknown"}
    assert has_tool or not named
    assert len(work.payloads) <= ITERATIONS + 2
