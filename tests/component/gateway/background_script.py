"""Requests for background responses, and readers of their answers."""

import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from gateway_script import Frame, RawResponse, RunningGateway, delta, finished, serving, started, usage
from response_script import PATH, MemoryResponses, body
from task_script import ScriptedTasks, output

from gateway.gateway_config import GatewayConfig
from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2


def asking(**fields: object) -> dict[str, object]:
    return body(**{"background": True, **fields})


def stage(
    tasks: ScriptedTasks, store: MemoryResponses | None = None, config: GatewayConfig | None = None
) -> AbstractAsyncContextManager[RunningGateway]:
    return serving(responses=store or MemoryResponses(), tasks=tasks, config=config)


async def asked(gateway: RunningGateway, headers: Mapping[str, str] | None = None, **fields: object) -> dict[str, Any]:
    """A new background response, as first answered."""
    made: dict[str, Any] = (await gateway.request("POST", PATH, asking(**fields), headers)).of(200)
    return made


async def found(gateway: RunningGateway, response_id: str) -> dict[str, Any]:
    body: dict[str, Any] = await gateway.read(f"{PATH}/{response_id}")
    return body


async def made_whole(gateway: RunningGateway, **fields: Any) -> dict[str, Any]:
    """A response after the end of its task, which ends at once."""
    return await found(gateway, (await asked(gateway, **fields))["id"])


async def followed(gateway: RunningGateway, response_id: str, starting_after: int | None = None) -> RawResponse:
    after = "" if starting_after is None else f"&starting_after={starting_after}"
    return await gateway.request("GET", f"{PATH}/{response_id}?stream=true{after}")


def events_in(raw: bytes) -> list[dict[str, Any]]:
    blocks = raw.decode().split("\n\n")
    return [json.loads(block.split("\ndata: ")[1]) for block in blocks if block.startswith("event: ")]


def call(text: str) -> event_pb2.InferenceEvent:
    return delta(tool_calls=[event_pb2.ToolCallDelta(index=0, name="weather", arguments_text=text)])


def long_answer() -> list[Frame]:
    """Reasoning, text and a function call without an id, one event per frame."""
    events = [started(), delta(reasoning="hm"), delta("It is"), delta(" sunny"), call("{"), call("}")]
    events += [delta(finish="TOOL_CALLS"), usage(), finished()]
    return [[event] for event in events]


def pieces(frames: list[Frame]) -> list[task_pb2.TaskOutput]:
    """One chunk per frame."""
    return [output(frame) for frame in frames]


def hello_pieces() -> list[task_pb2.TaskOutput]:
    return pieces([[started()], [delta("Hello")], [delta(", world")], [delta(finish="STOP"), usage(), finished()]])
