"""The synchronous client."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import grpc

from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.client._channel import mesh_address, open_mesh_channel, security_with
from weft.client._messages import ChatOptions, Message, chat_request, embed_request
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call


def connect(target: str | None = None, *, home: Path | str | None = None, api_key: str | None = None) -> "Mesh":
    """The mesh at a gRPC target, or the one that runs on `home`. `api_key`: instead of WEFT_API_KEY."""
    return Mesh(target or mesh_address(home), api_key)


class Mesh:
    """Calls on one mesh. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, api_key: str | None = None) -> None:
        self._channel = open_mesh_channel(target, security_with(api_key))
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        self._channel.close()

    def chat(
        self,
        model: str,
        messages: str | Iterable[Message],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[event_pb2.InferenceEvent]:
        """The events of a chat as they come; leaving the iterator cancels it. `timeout` is the deadline in seconds."""
        call = self._stub.Chat(chat_request(model, messages, options), timeout=timeout)
        try:
            for response in call:
                yield from response.events
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        finally:
            call.cancel()

    def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[list[float]]:
        """One vector per text."""
        try:
            response = self._stub.Embed(embed_request(model, texts), timeout=timeout)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        return [list(embedding.values) for embedding in response.embeddings]
