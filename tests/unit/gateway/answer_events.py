"""Events of answers, what their encoders are told, and a server whose answer the real clients read."""

import json
from typing import Any

import httpx2

from gateway.answers.answer_builder import AnswerIdentity
from weft.api.common.v1 import event_pb2, receipt_pb2, usage_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

IDENTITY = AnswerIdentity(answer_id="chatcmpl-1", created=1_700_000_000, model="pool")
LOST = WeftError(Reason.WORKER_LOST, "the worker\nis gone")
Event = event_pb2.InferenceEvent
Frame = list[Event]


def piece(text: str = "", **fields: Any) -> Event:
    return Event(delta=event_pb2.Delta(text=text, **fields))


def call(index: int = 0, **fields: Any) -> event_pb2.ToolCallDelta:
    return event_pb2.ToolCallDelta(index=index, **fields)


def calling(*calls: event_pb2.ToolCallDelta) -> Event:
    return piece(tool_calls=calls)


def started(model: str = "tiny") -> Event:
    return Event(started=event_pb2.Started(model=model))


def stopped(reason: str = "STOP", text: str = "", **fields: Any) -> Event:
    return piece(text, finish_reason=event_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"), **fields)


def finished(prompt: int = 4, completion: int = 2) -> Event:
    usage = usage_pb2.Usage(prompt_tokens=prompt, completion_tokens=completion)
    return Event(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt(usage=usage)))


def end(reason: str = "STOP") -> Frame:
    return [stopped(reason), finished()]


def data_of(encoded: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, each of a line."""
    lines = [line.removeprefix("data: ") for line in encoded.decode().split("\n")]
    return [json.loads(line) for line in lines if line.startswith("{")]


class StreamServer:
    """Answers the requests of `http` with `raw`."""

    def __init__(self) -> None:
        self.raw = b""
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.raw, request=request)
