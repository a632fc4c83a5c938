"""A gateway with scripted collaborators as a process of its own: bad input cannot harm the test process.

    python bad_inputs_server.py <log file> [keys] [patient]

`patient`: it has the usual timeouts, and room for 10,000 connections.

Its first line of output is JSON: its port, and its routes as [method, path] each. It ends when its input does.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from admin_script import admin_ports
from file_script import NOW, MemoryBatches, MemoryFiles
from gateway_script import (
    FixedFleet,
    Frame,
    ScriptedDispatcher,
    app_of,
    delta,
    embeddings,
    finished,
    model,
    started,
    usage,
)
from kit.keys import Keys
from registry_script import ScriptedRegistry
from response_script import MemoryResponses
from task_script import ScriptedTasks, output
from test_api_keys_http import ScriptedKeys
from test_gateway_requests import ScriptedRequests

from gateway.gateway_config import BatchEdgeConfig, ConnectionLimits, GatewayConfig
from gateway.gateway_service import build
from gateway.ports import GatewayPorts
from gateway.registry_client import RegistryService
from gateway.routing import routes_of
from weft.api.common.v1 import (
    audio_pb2,
    chat_pb2,
    completion_pb2,
    event_pb2,
    image_pb2,
    receipt_pb2,
    rerank_pb2,
    tokenize_pb2,
)
from weft.api.router.v1 import file_service_pb2, task_service_pb2
from weft.dispatch.call import Call
from weft.dispatch.operation_table import SpeechPiece
from weft.durable.batches import BATCH_INPUT
from weft.durable.tasks import payload_of
from weft.extension import own_extensions
from weft.kernel.machine.memory_tuning import settle_memory
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import configure_logging
from weft.kernel.time.timestamps import stamp_of

_LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}'
CONFIG = GatewayConfig(
    port=0,
    body_timeout_seconds=2.0,
    batches=BatchEdgeConfig(max_file_bytes=64 * 1024 * 1024),
    connections=ConnectionLimits(header_timeout_seconds=1.0, body_grace_seconds=0.3, linger_seconds=0.3),
)
"""Short timeouts for callers, so that the test can wait for them."""
PATIENT = GatewayConfig(port=0, connections=ConnectionLimits(max_connections=10_000))


def answer_to(payload: object) -> list[Frame]:
    """A complete answer with the requested number of choices."""
    count = 1
    if isinstance(payload, chat_pb2.ChatPayload):
        count = payload.choice_count or 1
    elif isinstance(payload, completion_pb2.CompletionPayload):
        count = len(payload.prompts) * (payload.choice_count or 1)
    choices = [delta("Hello", index=index, finish="STOP") for index in range(count)]
    return [[started()], choices, [usage(), finished()]]


IMAGE = image_pb2.GeneratedImage(image=chat_pb2.MediaPart(data=b"image", media_type="image/png"))
PART = audio_pb2.TranscriptPart(text="words", language="en", duration_seconds=1.5)
_KEPT_MEDIA: Mapping[type, event_pb2.InferenceEvent] = {
    image_pb2.ImagePayload: event_pb2.InferenceEvent(image=IMAGE),
    audio_pb2.TranscriptionPayload: event_pb2.InferenceEvent(transcript=PART),
    audio_pb2.SpeechPayload: event_pb2.InferenceEvent(
        speech=audio_pb2.SpeechPart(media_type="audio/mpeg", file_id="file-1")
    ),
}
"""What a task on media has in its output."""
_ANSWERS: Mapping[Operation, Callable[[Any], Sequence[Any]]] = {
    Operation.CHAT: answer_to,
    Operation.COMPLETION: answer_to,
    Operation.EMBEDDING: lambda payload: [embeddings([[0.5, 0.25]] * len(payload.inputs))],
    Operation.TOKENIZE: lambda _: [tokenize_pb2.TokenizeResult(count=3)],
    Operation.RERANK: lambda payload: [
        [rerank_pb2.RerankScore(index=index, score=0.5) for index in range(len(payload.documents))]
    ],
    Operation.IMAGE: lambda payload: [
        *([[event_pb2.InferenceEvent(image=IMAGE)]] * max(1, payload.count)),
        [finished()],
    ],
    Operation.TRANSCRIPTION: lambda _: [[event_pb2.InferenceEvent(transcript=PART)]],
}


@dataclass
class ForgetfulDispatcher(ScriptedDispatcher):
    """Answers and stores nothing, so that the memory of the process is that of the gateway."""

    spoken: Any = field(default_factory=lambda: [SpeechPiece(data=b"sound", media_type="audio/mpeg")])

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        if call.spec.operation is Operation.SPEECH:
            return list(self.spoken)
        return _ANSWERS[call.spec.operation](call.payload)

    def receipt(self) -> receipt_pb2.Receipt:
        return receipt_pb2.Receipt(model="tiny")

    def note(self, call: Call[Any]) -> None:
        self.was_asked.set()


def forgetful_files() -> MemoryFiles:
    """One file for batches, and no room for another."""
    found = file_service_pb2.File(
        id="file-1",
        tenant="default",
        name="in",
        purpose=BATCH_INPUT,
        byte_count=len(_LINE),
        create_time=stamp_of(NOW),
        expire_time=stamp_of(NOW),
    )
    return MemoryFiles({"file-1": (found, [_LINE])}, keeps_nothing=True, count=1)


@dataclass
class ForgetfulTasks(ScriptedTasks):
    """Completes every task at once, and stores only the last one."""

    async def submit(
        self, tenant: str, request: task_service_pb2.SubmitTaskRequest, *, caller: str = "local"
    ) -> task_service_pb2.SubmitTaskResponse:
        self.kept.clear()
        self.watched_from.clear()
        payload = payload_of(request.spec)
        vectors = [[0.5, 0.25]] * len(request.spec.embedding.inputs)
        answer = answer_to(payload)
        if (media := _KEPT_MEDIA.get(type(payload))) is not None:
            answer[1] = [media]
        self.at_once = [output(*answer, vectors=vectors)]
        return await super().submit(tenant, request, caller=caller)


def forgetful_ports(*, with_keys: bool = False) -> GatewayPorts:
    """Collaborators that answer everything and store nothing."""
    return GatewayPorts(
        extensions=own_extensions(),
        dispatcher=ForgetfulDispatcher(),
        fleet=FixedFleet.of(model("tiny")),
        registry=ScriptedRegistry(),
        admin=admin_ports(),
        requests=ScriptedRequests(),
        keys=Keys() if with_keys else None,
        api_keys=RegistryService(ScriptedKeys(), timeout_seconds=5.0),
        responses=MemoryResponses(),
        tasks=ForgetfulTasks(),
        files=forgetful_files(),
        batches=MemoryBatches(keeps_nothing=True),
    )


async def serve(log: TextIO, config: GatewayConfig, *, with_keys: bool) -> None:
    """Serve until the input ends."""
    configure_logging("gateway", file=log)
    ports = forgetful_ports(with_keys=with_keys)
    app = app_of(config, ports)
    for api in app._deferred:
        api.load()(app)
    routes = routes_of(app.served)
    service = build(config, ports)
    await service.start()
    settle_memory()
    table = [[method, route.path] for route in routes for method in sorted(route.methods or ())]
    sys.stdout.write(json.dumps({"port": service.port, "routes": table}) + "\n")
    sys.stdout.flush()
    try:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await service.stop(grace_seconds=0.0)


if __name__ == "__main__":
    with open(sys.argv[1], "a", buffering=1) as opened:  # noqa: PTH123 - a log, line by line
        asyncio.run(serve(opened, PATIENT if "patient" in sys.argv[2:] else CONFIG, with_keys="keys" in sys.argv[2:]))
