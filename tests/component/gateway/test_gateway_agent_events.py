"""An agent's request on its way to the runner, and the notices of its answers."""

import json
from pathlib import Path

from gateway_script import (
    FixedFleet,
    RunningGateway,
    ScriptedDispatcher,
    Step,
    agent,
    delta,
    finished,
    model,
    serving,
    started,
)
from kit.messages import changed
from mesh_script import dispatching

from weft.api.common.v1 import agent_behaviour_pb2, event_pb2, signal_pb2, warning_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object

BEHAVIOUR = agent_behaviour_pb2.AgentBehaviour(tools=["files.read"], signals=["NEEDS_EXTERNAL_INFO"])
MESSAGES = [{"role": "user", "content": "Say hello"}]


def fleet() -> FixedFleet:
    coder = agent("coder")
    asking = changed(coder, manifest=changed(coder.manifest, behaviour=BEHAVIOUR))
    return FixedFleet.of(model("tiny"), agents=[asking, agent("plain")])


def answer_with_notices() -> list[Step]:
    """An answer that begins with a tool, with every kind of notice."""
    warning = warning_pb2.Warning(
        code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="mirostat", message="was not used"
    )
    call = event_pb2.ToolCall(id="call-1", name="files.read", arguments=to_json_object({"path": "a"}, "a"))
    signal = signal_pb2.Signal(name="NEEDS_EXTERNAL_INFO", arguments=to_json_object({"query": "weather"}, "a"))
    return [
        [started()],
        [event_pb2.InferenceEvent(warning=warning)],
        [event_pb2.InferenceEvent(tool_call=call)],
        [event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(id="call-1", content="text"))],
        [delta("Hello")],
        [event_pb2.InferenceEvent(signal=signal)],
        [delta(finish="STOP"), finished()],
    ]


async def chat(gateway: RunningGateway, **fields: object) -> tuple[dict[str, str], str]:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
    response = await gateway.request("POST", "/v1/chat/completions", body)
    assert response.status == 200, response.body
    return response.headers, response.body.decode()


async def test_agent_behavior_reaches_the_runner_on_every_attempt(tmp_path: Path) -> None:
    died = WeftError(Reason.SERVER_DIED, "it died")
    async with (
        dispatching(tmp_path, fleet(), died) as (dispatcher, _, runner),
        serving(dispatcher, fleet=fleet()) as gateway,
    ):
        for name in ("agent/coder", "agent/plain", "tiny"):
            await chat(gateway, model=name)
    asked = [(each.agent, each.behaviour if each.HasField("behaviour") else None) for each in runner.asked]
    assert asked == [("coder", BEHAVIOUR), ("coder", BEHAVIOUR), ("plain", None), ("", None)]


async def test_failure_after_a_tool_ran_is_the_last_event_of_a_started_stream() -> None:
    steps: list[Step] = [*answer_with_notices()[:3], WeftError(Reason.SERVER_DIED, "it died")]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        _, body = await chat(gateway, stream=True)
    events = [part for part in body.split("\n\n") if part]
    assert events[1] == ": tool files.read"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "server_died"
    assert "[DONE]" not in body


async def test_failure_after_only_a_warning_is_still_a_status() -> None:
    steps: list[Step] = [*answer_with_notices()[:2], WeftError(Reason.SERVER_DIED, "it died")]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True}).encode()
        response = await gateway.request("POST", "/v1/chat/completions", body)
    assert response.status == 502
    assert response.error["code"] == "server_died"
