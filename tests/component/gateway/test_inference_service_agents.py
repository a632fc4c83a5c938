"""Agents over gRPC: the router's InferenceService over the same dispatcher as the gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gateway_script import FixedFleet, agent, delta, model
from inference_stage import PROMPT, conversation, embedding, inference, outcome, refused, stub_of
from kit.messages import changed
from mesh_script import AnsweringRunner, dispatching

from weft.api.common.v1 import (
    agent_behaviour_pb2,
    completion_pb2,
    event_pb2,
    receipt_pb2,
    signal_pb2,
    warning_pb2,
)
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import to_json_object

BEHAVIOUR = agent_behaviour_pb2.AgentBehaviour(tools=["files.read"], platform_prompt=True)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Any, AnsweringRunner]]:
    keeper = changed(agent("keeper"), manifest=changed(agent("keeper").manifest, behaviour=BEHAVIOUR))
    fleet = FixedFleet.of(model("tiny"), agents=[agent("coder", temperature=0.25), keeper])
    async with dispatching(folder, fleet) as (dispatcher, _, runner), inference(folder, dispatcher) as channel:
        yield stub_of(channel), runner


async def test_chat_with_an_agent_is_answered_by_its_model(tmp_path: Path) -> None:
    async with serving(tmp_path) as (stub, runner):
        call = stub.Chat(pb.ChatRequest(model="agent/coder", payload=conversation("Say hello")))
        events = await outcome(call)
        trailer = dict(await call.trailing_metadata())
    assert "".join(event.delta.text for event in events) == "Hello, world"
    asked = runner.asked[0].chat
    assert [message.content[0].text for message in asked.messages] == ["Be terse.", "Say hello"]
    assert asked.sampling.temperature == 0.25
    receipt = receipt_pb2.Receipt.FromString(trailer["weft-receipt-bin"])
    assert receipt == events[-1].finished.receipt
    assert (receipt.model, receipt.outcome) == ("tiny", receipt_pb2.OUTCOME_COMPLETED)


async def test_signals_are_events_in_order_and_repeated_in_the_receipt(tmp_path: Path) -> None:
    # The maximum number of names of maximum length: more than metadata can hold.
    arguments = to_json_object({"reason": "x" * 2_000}, "arguments")
    raised = [signal_pb2.Signal(name=f"S{n}", arguments=arguments) for n in range(64)]
    warned = [warning_pb2.Warning(message="x" * 500, field=str(n)) for n in range(64)]
    receipt = receipt_pb2.Receipt(signals=raised, warnings=warned, tool_run_count=3)
    async with serving(tmp_path) as (stub, runner):
        runner.steps = [
            *([event_pb2.InferenceEvent(signal=signal)] for signal in raised),
            [delta("Hello", finish="STOP"), event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt))],
        ]
        call = stub.Chat(pb.ChatRequest(model="agent/coder", payload=conversation("Say hello")))
        events = await outcome(call)
        trailer = receipt_pb2.Receipt.FromString(dict(await call.trailing_metadata())["weft-receipt-bin"])
    assert [event.signal for event in events[:64]] == raised
    told = events[-1].finished.receipt
    assert (list(told.signals), list(told.warnings), told.tool_run_count) == (raised, warned, 3)
    assert (trailer.tool_run_count, trailer.model) == (3, "tiny")
    assert len(trailer.signals) == len(trailer.warnings) == 0


async def test_agent_behavior_comes_only_from_the_registry(tmp_path: Path) -> None:
    extra = to_json_object({"behaviour": {"tools": ["files.read"]}}, "extra_parameters")
    async with serving(tmp_path) as (stub, runner):
        for name in ("agent/keeper", "agent/coder"):
            payload = conversation("Say hello")
            payload.extra_parameters.CopyFrom(extra)
            await outcome(stub.Chat(pb.ChatRequest(model=name, payload=payload)))
    keeper, coder = runner.asked
    assert (keeper.agent, keeper.behaviour) == ("keeper", BEHAVIOUR)
    assert (coder.agent, coder.HasField("behaviour")) == ("coder", False)
    assert coder.chat.extra_parameters == extra


async def test_too_many_parameters_are_rejected_before_a_runner_is_called(tmp_path: Path) -> None:
    payload = conversation("Say hello")
    payload.extra_parameters.CopyFrom(to_json_object({f"x{n}": 1 for n in range(65)}, "extra_parameters"))
    async with serving(tmp_path) as (stub, runner):
        refusal = await refused(stub.Chat(pb.ChatRequest(model="agent/coder", payload=payload)))
    assert (refusal.reason, refusal.metadata["field"]) == (Reason.INVALID_ARGUMENT, "payload.extra_parameters")
    assert runner.asked == []


async def test_invalid_request_is_rejected_with_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as (stub, runner):
        unknown = await refused(stub.Chat(pb.ChatRequest(model="agent/nobody", payload=conversation("Say hello"))))
        hostile = await refused(stub.Chat(pb.ChatRequest(model="agent/../x", payload=conversation("Say hello"))))
        payload = completion_pb2.CompletionPayload(prompts=[PROMPT])
        completion = await refused(stub.Complete(pb.CompleteRequest(model="agent/coder", payload=payload)))
        embedded = await refused(stub.Embed(pb.EmbedRequest(model="agent/coder", payload=embedding())))
    assert (unknown.reason, unknown.metadata["unknown_name"]) == (Reason.MODEL_NOT_FOUND, "nobody")
    assert "there are agent/coder, agent/keeper" in unknown.message
    assert (hostile.reason, hostile.metadata["field"]) == (Reason.INVALID_ARGUMENT, "model")
    assert completion.reason is embedded.reason is Reason.UNSUPPORTED_OPERATION
    assert runner.asked == []
