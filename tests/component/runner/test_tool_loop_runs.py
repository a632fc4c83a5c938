"""The tool loop through a real runner with a real engine process: scripted turns, real tools."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.engines import control_of, fake_engine
from runner_harness import RunningRunner, events_of, ready_runner, refusal
from structlog.testing import capture_logs

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.tools.port import ToolSettings
from weft.api.common.v1 import agent_behaviour_pb2, event_pb2
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.state import FakeState

Behaviour = agent_behaviour_pb2.AgentBehaviour
ADD = {"name": "add", "arguments": '{"a": 1, "b": 2}'}


def _tool(name: str, **limits: Any) -> ToolSettings:
    return ToolSettings(type="python", name=name, function=f"loop_tools:{name}", **limits)


class Stage:
    def __init__(self, runner: RunningRunner, backend: LlamaServerBackend) -> None:
        self.runner = runner
        self._backend = backend

    async def answer(self, **behaviour: Any) -> list[event_pb2.InferenceEvent]:
        async with asyncio.timeout(20):
            return await events_of(self.runner.generate(max_tokens=4000, behaviour=Behaviour(**behaviour)))

    async def refusal(self, **behaviour: Any) -> Reason:
        call = self.runner.generate(max_tokens=4000, behaviour=Behaviour(**behaviour))
        async with asyncio.timeout(20):
            return (await refusal(events_of(call))).reason

    async def engine(self) -> FakeState:
        async with control_of(self._backend) as control:
            return await control.wait_for_state(lambda state: state.active_requests == 0)


@asynccontextmanager
async def _stage(
    folder: Path,
    *turns: dict[str, Any],
    tools: Sequence[ToolSettings] = (),
    chat: ChatSettings | None = None,
    **switches: Any,
) -> AsyncIterator[Stage]:
    scripted = {"turns": turns} if turns else {}
    backend = fake_engine({**scripted, **switches})
    model = ServedModel(name="m", make_backend=lambda: backend, slots=1, chat=chat or ChatSettings())
    async with ready_runner(folder, [model], tools=tuple(tools)) as runner:
        yield Stage(runner, backend)


def _text(events: Sequence[event_pb2.InferenceEvent]) -> str:
    return "".join(event.delta.text for event in events)


def _receipt(events: Sequence[event_pb2.InferenceEvent]) -> Any:
    return events[-1].finished.receipt


def _kinds(events: Sequence[event_pb2.InferenceEvent]) -> list[str | None]:
    return [kind for event in events if (kind := event.WhichOneof("event")) not in ("delta", "progress")]


async def test_tool_runs_between_two_engine_turns(tmp_path: Path) -> None:
    turns: list[dict[str, Any]] = [{"text": "Let me add.", "calls": [ADD]}, {"text": " It is three."}]
    async with _stage(tmp_path, *turns, tools=[_tool("add")]) as stage:
        events = await stage.answer(tools=["add"], platform_prompt=True)
        body = (await stage.engine()).last_request_body
    assert _text(events) == "Let me add. It is three."
    assert _kinds(events) == ["started", "tool_call", "tool_result", "usage", "finished"]
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert "Tool rounds left: 7" in body["messages"][0]["content"]
    assert body["messages"][-1]["content"] == "3"
    assert _receipt(events).tool_run_count == 1
    assert _receipt(events).usage.completion_tokens > 8


@pytest.mark.parametrize(
    "turn",
    [
        {"calls": [{"name": "add", "arguments": '{"a": "hush hush", "b": 2}'}]},
        {"text": "hush hush, and this line has enough words to be told from a table\n" * 60},
    ],
)
async def test_model_output_reaches_the_caller_and_no_log(tmp_path: Path, turn: dict[str, Any]) -> None:
    kill = agent_behaviour_pb2.REPETITION_POLICY_KILL
    async with _stage(tmp_path, turn, tools=[_tool("add")]) as stage:
        with capture_logs() as logs:
            call = stage.runner.generate(max_tokens=4000, behaviour=Behaviour(tools=["add"], repetition_policy=kill))
            async with asyncio.timeout(20):
                told = await refusal(events_of(call))
    assert "hush hush" in told.message
    assert any(line["event"] == "attempt failed" for line in logs)
    assert "hush hush" not in str(logs)


async def test_looping_answer_is_killed_and_the_engine_stops(tmp_path: Path) -> None:
    async with _stage(tmp_path, repeat_line="I will now look at the file once more.") as stage:
        kill = agent_behaviour_pb2.REPETITION_POLICY_KILL
        assert await stage.refusal(repetition_policy=kill) is Reason.REPEATED_LINE_LOOP
        await stage.runner.until_idle("m")
        assert (await stage.engine()).active_requests == 0
