"""The router's InferenceService over a dispatcher, and calls of it."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.grpc_server import served

from router_svc.inference_servicer import InferenceServicer
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2
from weft.api.router.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft.dispatch.call import RequestDispatcher
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.json_schema import SchemaLimits

PROMPT = completion_pb2.PromptInput(text="hi")


def inference(
    folder: Path, dispatcher: RequestDispatcher, journal: JournalPolicy | None = None
) -> AbstractAsyncContextManager[grpc.aio.Channel]:
    """A channel to the service."""
    servicer = InferenceServicer(dispatcher, 30, SchemaLimits(), journal)
    return served(servicer.add_to_server, address=f"unix:{folder / 'router.sock'}")


def stub_of(channel: grpc.aio.Channel) -> Any:
    return InferenceServiceStub(channel)


def conversation(text: str = "hi") -> chat_pb2.ChatPayload:
    payload = chat_pb2.ChatPayload()
    payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text=text)
    return payload


def embedding() -> embedding_pb2.EmbeddingPayload:
    return embedding_pb2.EmbeddingPayload(inputs=[PROMPT])


async def outcome(call: Any) -> list[Any]:
    """The events of a call, or its answer. Raises its error as the mesh's code sees it."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            return [event async for response in call for event in response.events]
        return [await call]
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, Reason.WORKER_LOST) from error


async def refused(call: Any) -> WeftError:
    with pytest.raises(WeftError) as caught:
        await outcome(call)
    return caught.value
