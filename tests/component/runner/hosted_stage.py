"""What the tests of backends over libraries share: stand-ins for libraries, their faults, and requests."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from runner_svc.backend.port import BackendFacts, CallInfo
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.started_server import StartedServer
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.kernel.telemetry import new_traceparent
from weft_testing.conformance.backend import Engine
from weft_testing.conformance.backend_port import MAX_LOG_BYTES

LIBRARY = Path(__file__).with_name("scripted_library")
CALL = CallInfo(request_id="r1", traceparent=new_traceparent())
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SWITCHES: dict[Engine, dict[str, Any]] = {
    Engine.NORMAL: {},
    Engine.SLOW: {"endless": True, "seconds_per_token": 0.05},
    Engine.NEVER_READY: {"never_ready": True},
    Engine.EXITS_AT_START: {"exit_at_start": 3},
    Engine.IGNORES_SIGTERM: {"ignore_sigterm": True},
    Engine.NOISY: {"stderr_flood_bytes": MAX_LOG_BYTES},
    Engine.WITH_DESCENDANT: {"fork_grandchild": True},
}
START_SECONDS = 20.0
ANSWER_SECONDS = 20.0
_STALLS = {"never_ready", "load_step_seconds"}
Backend = TypeVar("Backend", bound=StartedServer[Any])


def scripted(variable: str, switches: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The settings of a backend over a stand-in, whose switches are in this environment variable."""
    return {
        "environment": {**os.environ, "PYTHONPATH": str(LIBRARY), variable: json.dumps(switches or {})},
        # Short only where it is what the test is about: a busy machine may not move a process for a second.
        "load_stall_seconds": 1.0 if _STALLS & set(switches or {}) else 30.0,
        "graces": StopGraces(first_term_seconds=0.3, second_term_seconds=0.3),
        **settings,
    }


def model_folder(folder: Path, weights: str, config: dict[str, Any], **left_out: bool) -> Path:
    """A folder with the files of a model; `left_out` names those that are missing."""
    folder.mkdir()
    files = {
        weights: "weights",
        "config.json": json.dumps(config),
        "tokenizer.json": json.dumps({"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "<s>"}]}),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>"}),
        "chat_template.jinja": TEMPLATE,
    }
    for name, text in files.items():
        if name not in left_out:
            (folder / name).write_text(text)
    return folder


@asynccontextmanager
async def started(backend: Backend) -> AsyncGenerator[tuple[Backend, BackendFacts]]:
    """The backend, started, and its facts; stopped with the block."""
    async with asyncio.timeout(START_SECONDS):
        facts = await backend.start()
    try:
        yield backend, facts
    finally:
        await backend.stop()


def chat(text: str = "hi", **fields: Any) -> chat_pb2.ChatPayload:
    """A chat of one message."""
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])
    return chat_pb2.ChatPayload(messages=[message], **fields)


async def frames_of(backend: StartedServer[Any], payload: Any, call: CallInfo = CALL) -> list[Frame]:
    """The whole answer."""
    async with asyncio.timeout(ANSWER_SECONDS):
        return [frame async for frame in backend.generate(payload, call)]


async def events_of(backend: StartedServer[Any], payload: Any, call: CallInfo = CALL) -> Frame:
    """The events of the whole answer."""
    return [event for frame in await frames_of(backend, payload, call) for event in frame]


async def reply(backend: StartedServer[Any], payload: Any, call: CallInfo = CALL) -> str:
    """The text of the whole answer."""
    return "".join(event.delta.text for event in await events_of(backend, payload, call))
