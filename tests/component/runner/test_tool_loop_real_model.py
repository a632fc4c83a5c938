"""The tool loop with a real language model on the real llama.cpp server."""

from pathlib import Path

import pytest
from kit.engine_settings import engine_settings
from runner_harness import events_of, ready_runner

from runner_svc.chat.offered_tools import json_object
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel, llama_command
from runner_svc.tools.port import ToolSettings
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2
from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ARGUMENTS = {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"]}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "add"}, "arguments": ARGUMENTS},
    "required": ["name", "arguments"],
}


async def test_tool_call_written_by_the_model_runs_and_its_result_is_used(tmp_path: Path) -> None:
    # A model this small calls nothing by itself; a grammar makes it write a call, and again when it has the result.
    form = chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchemaFormat(name="call", schema=json_object(CALL)))
    server = engine_settings(
        LlamaServerModel,
        command=llama_command(None),
        path=demo_model_path(),
        name="m",
        slots=1,
        context_tokens=2048,
        threads=1,
    )
    model = ServedModel(name="m", make_backend=lambda: LlamaServerBackend(*server), slots=1)
    behaviour = agent_behaviour_pb2.AgentBehaviour(platform_prompt=True, tools=["add"], max_tool_iterations=1)
    tools = [ToolSettings(type="python", name="add", function="loop_tools:add")]
    async with ready_runner(tmp_path, [model], tools=tuple(tools)) as runner:
        events = await events_of(runner.generate(max_tokens=200, behaviour=behaviour, response_format=form))
    call = next(event.tool_call for event in events if event.HasField("tool_call"))
    a, b = (field.value.integer_value for field in call.arguments.fields)
    assert [event.tool_result.content for event in events if event.HasField("tool_result")] == [str(a + b)]
    receipt = events[-1].finished.receipt
    assert receipt.tool_run_count == 1
    assert receipt.usage.prompt_tokens > 200
    assert '"add"' in "".join(event.delta.text for event in events), "the second turn is text: no rounds were left"
