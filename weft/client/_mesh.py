"""The clients of inference: `Mesh` and `AsyncMesh`."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast

import grpc

from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.client._channel import ServiceClient, mesh_address, named_by_variable, security_with
from weft.client._messages import ChatOptions, Message, chat_request, embed_request
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, open_channel

if TYPE_CHECKING:
    from weft.api.router.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub


def connect_async(
    target: str | None = None, *, home: Path | str | None = None, api_key: str | None = None
) -> "AsyncMesh":
    """Connects to the mesh at a gRPC target, or that runs on `home`. Call it on the event loop that will use it.

    `api_key`: instead of WEFT_API_KEY.
    """
    return AsyncMesh(target or mesh_address(home), api_key)


class AsyncMesh:
    """Calls on one mesh. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, api_key: str | None = None) -> None:
        try:
            self._channel = open_channel(target, security_with(api_key))
        except FieldError as error:
            raise named_by_variable(error) from error
        self._stub = cast("InferenceServiceAsyncStub", inference_service_pb2_grpc.InferenceServiceStub(self._channel))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        await self._channel.close(grace=None)

    async def chat(
        self,
        model: str,
        messages: str | Iterable[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[event_pb2.InferenceEvent]:
        """Yields the events of a chat; closing the generator cancels it. `timeout` is the deadline in seconds."""
        call = self._stub.Chat(chat_request(model, messages, options), timeout=timeout)
        try:
            async for response in call:
                for event in response.events:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        finally:
            call.cancel()

    async def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[list[float]]:
        """Returns one vector per text."""
        try:
            response = await self._stub.Embed(embed_request(model, texts), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return [list(embedding.values) for embedding in response.embeddings]


def connect(target: str | None = None, *, home: Path | str | None = None, api_key: str | None = None) -> "Mesh":
    """Connects to the mesh at a gRPC target, or that runs on `home`. `api_key`: instead of WEFT_API_KEY."""
    return Mesh(target or mesh_address(home), api_key)


class Mesh(ServiceClient):
    """Calls on one mesh. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, api_key: str | None = None) -> None:
        super().__init__(target, None, security_with(api_key))
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def chat(
        self,
        model: str,
        messages: str | Iterable[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[event_pb2.InferenceEvent]:
        """Yields the events of a chat; leaving the iterator cancels it. `timeout` is the deadline in seconds."""
        for response in self._stream(self._stub.Chat(chat_request(model, messages, options), timeout=timeout)):
            yield from response.events

    def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[list[float]]:
        """Returns one vector per text."""
        response = self._call(self._stub.Embed, embed_request(model, texts), timeout)
        return [list(embedding.values) for embedding in response.embeddings]
