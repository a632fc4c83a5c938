"""Answers that are not streamed to their caller."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.engines import fake_model
from runner_harness import RunningRunner, events_of, ready_runner

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.timeouts import TimeoutProfile
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.frames import apart

WHOLE_MESSAGES = 2
"""At most: the first content, and the rest with the end."""
TIMEOUTS = TimeoutProfile(headers_seconds=30.0, absolute_seconds=600.0)


def _model(context_tokens: int = 2048, **switches: Any) -> ServedModel:
    engine = {"context_tokens": context_tokens, "timeouts": TIMEOUTS}
    return fake_model("m", switches, engine, timeouts=TIMEOUTS)


@dataclass
class _Whole:
    stub: Any

    def Generate(self, request: Any, timeout: float | None) -> Any:  # noqa: N802 - the stub's names
        request.options.whole = True
        return self.stub.Generate(request, timeout=timeout)


async def _messages(runner: RunningRunner, *, whole: bool) -> list[list[Any]]:
    stub = runner.generation
    runner.generation = _Whole(stub) if whole else stub  # type: ignore[assignment]  # all that is used of it
    messages = [list(message.events) async for message in runner.generate(max_tokens=40)]
    runner.generation = stub
    return messages


def _text(messages: list[list[Any]]) -> str:
    return "".join(event.delta.text for message in messages for event in message)


async def test_whole_answer_has_the_same_text_in_at_most_two_messages(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model(tokens_per_second=500)]) as runner:
        streamed = await _messages(runner, whole=False)
        whole = await _messages(runner, whole=True)
    assert len(whole) <= WHOLE_MESSAGES
    assert _text(whole) == _text(streamed)
    assert whole[0][0].HasField("started")
    costs = [messages[-1][-1].finished.receipt.usage.completion_tokens for messages in (whole, streamed)]
    assert costs == [16, 16]


@dataclass
class _Joined:
    stub: Any

    def Generate(self, request: Any, timeout: float | None) -> Any:  # noqa: N802 - the stub's names
        request.options.joined_texts = True
        return self.stub.Generate(request, timeout=timeout)


async def test_joined_texts_are_sent_in_fewer_events_with_the_same_content(tmp_path: Path) -> None:
    async with ready_runner(tmp_path, [_model(answer_tokens=400)]) as runner:
        apart_ones = await events_of(runner.generate(max_tokens=400))
        runner.generation = _Joined(runner.generation)  # type: ignore[assignment]  # all that is used of it
        joined = await events_of(runner.generate(max_tokens=400))
    assert not any(event.delta.piece_lengths for event in apart_ones)
    assert any(event.delta.piece_lengths for event in joined)
    assert [event.delta for event in apart(joined)] == [event.delta for event in apart_ones]
    assert [events[-1].finished.receipt.usage.completion_tokens for events in (joined, apart_ones)] == [400, 400]


async def test_disconnect_during_joined_texts_frees_the_engine(tmp_path: Path) -> None:
    # At full speed an answer of 2,048 tokens can be over before its first frame is read here.
    async with ready_runner(tmp_path, [_model(context_tokens=1_000_000, answer_tokens=0)]) as runner:
        runner.generation = _Joined(runner.generation)  # type: ignore[assignment]  # all that is used of it
        call = runner.generate(max_tokens=1_000_000)
        while not any(event.delta.piece_lengths for event in (await call.read()).events):
            pass
        call.cancel()
        async with asyncio.timeout(10):
            while (await runner.described()).active_request_ids:
                pass
        assert (await runner.described()).requests[0].state == runner_service_pb2.RequestRecord.STATE_CANCELLED
