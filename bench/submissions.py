"""Submits durable tasks, each as soon as the last is acknowledged. Reads a job from stdin, prints its result."""

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc
import msgspec

from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc
from weft.kernel.channels.rpc import open_channel

if TYPE_CHECKING:
    from weft.api.router.v1.task_service_pb2_grpc import TaskServiceAsyncStub

PROMPT = "Explain in one sentence why the sky is blue, and in a second one why the sea is."


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob:
    """Who submits what, and for how long."""

    address: str
    model: str
    clients: int
    seconds: float = 0.0
    """0: until `most` are acknowledged."""
    most: int = 10_000_000
    channels: int = 8
    """Shared by the clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitResult:
    """What was acknowledged."""

    acknowledged: int
    refused: int
    seconds: float
    latencies: list[float]
    """Seconds."""


def submission(model: str) -> task_service_pb2.SubmitTaskRequest:
    """A short chat, as durable work."""
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=PROMPT)])
    chat = chat_pb2.ChatPayload(messages=[message])
    chat.sampling.max_tokens = 16
    return task_service_pb2.SubmitTaskRequest(spec=task_pb2.TaskSpec(model=model, chat=chat))


async def play(job: SubmitJob) -> SubmitResult:
    """Every client submits one after another."""
    channels = [open_channel(job.address) for _ in range(min(job.channels, job.clients))]
    began = time.perf_counter()
    latencies: list[float] = []
    refused = 0

    async def client(channel: grpc.aio.Channel) -> None:
        nonlocal refused
        stub = cast("TaskServiceAsyncStub", task_service_pb2_grpc.TaskServiceStub(channel))
        request = submission(job.model)
        while len(latencies) < job.most and (not job.seconds or time.perf_counter() - began < job.seconds):
            sent = time.perf_counter()
            try:
                await stub.SubmitTask(request)
            except grpc.aio.AioRpcError:
                refused += 1
            else:
                latencies.append(time.perf_counter() - sent)

    await asyncio.gather(*(client(channels[number % len(channels)]) for number in range(job.clients)))
    seconds = time.perf_counter() - began
    for channel in channels:
        await channel.close()
    return SubmitResult(acknowledged=len(latencies), refused=refused, seconds=seconds, latencies=latencies)


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(asyncio.run(play(msgspec.json.decode(sys.stdin.buffer.read(), type=SubmitJob))))
    )
