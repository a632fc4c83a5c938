"""The clients of inference: `Mesh` and `AsyncMesh`."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from weft.api.common.v1 import audio_pb2, event_pb2, image_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.client._channel import ServiceClient, named_by_variable, security_with
from weft.client._home import mesh_address
from weft.client._media_messages import (
    ImageOptions,
    SpeechOptions,
    TranscriptionOptions,
    image_request,
    speech_request,
    transcription_request,
)
from weft.client._messages import ChatOptions, Message, chat_request, embed_request
from weft.kernel.channels.rpc import calling, open_channel
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.router.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub


def connect_async(
    target: str | None = None, *, home: Path | str | None = None, api_key: str | None = None
) -> "AsyncMesh":
    """Connects to the mesh at a gRPC target or on `home`. Call it on the event loop that will use it.

    `api_key` replaces WEFT_API_KEY.
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

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel and cancels running calls."""
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
        async with aclosing(_responses(call)) as responses:
            async for response in responses:
                for event in response.events:
                    yield event

    async def stream_images(
        self, model: str, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> AsyncGenerator[event_pb2.InferenceEvent]:
        """Yields waits, progress, previews, and each image when it is complete; closing the generator cancels it."""
        call = self._stub.StreamImages(image_request(model, prompt, options), timeout=timeout)
        async with aclosing(_responses(call)) as responses:
            async for response in responses:
                for event in response.events:
                    yield event

    async def generate_images(
        self, model: str, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> list[image_pb2.GeneratedImage]:
        """Returns the images when all are complete."""
        asked = image_request(model, prompt, options)
        request = pb.GenerateImagesRequest(model=model, payload=asked.payload, options=asked.options)
        with calling(Reason.SERVICE_UNAVAILABLE):
            return list((await self._stub.GenerateImages(request, timeout=timeout)).images)

    async def stream_transcription(
        self, model: str, audio: bytes, *, timeout: float | None = None, **options: Unpack[TranscriptionOptions]
    ) -> AsyncGenerator[event_pb2.InferenceEvent]:
        """Yields transcribed words, waits and progress; closing the generator cancels the request."""
        call = self._stub.StreamTranscription(transcription_request(model, audio, options), timeout=timeout)
        async with aclosing(_responses(call)) as responses:
            async for response in responses:
                for event in response.events:
                    yield event

    async def transcribe(
        self, model: str, audio: bytes, *, timeout: float | None = None, **options: Unpack[TranscriptionOptions]
    ) -> audio_pb2.Transcription:
        """Returns the whole transcription of a recording."""
        asked = transcription_request(model, audio, options)
        request = pb.TranscribeRequest(model=model, payload=asked.payload, options=asked.options)
        with calling(Reason.SERVICE_UNAVAILABLE):
            return (await self._stub.Transcribe(request, timeout=timeout)).transcription

    async def speak(
        self, model: str, text: str, *, timeout: float | None = None, **options: Unpack[SpeechOptions]
    ) -> AsyncGenerator[pb.SpeakResponse]:
        """Streams the spoken text: first its `media_type`, then the audio, last the `receipt`."""
        call = self._stub.Speak(speech_request(model, text, options), timeout=timeout)
        async with aclosing(_responses(call)) as responses:
            async for response in responses:
                yield response

    async def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[list[float]]:
        """Returns one vector per text."""
        with calling(Reason.SERVICE_UNAVAILABLE):
            response = await self._stub.Embed(embed_request(model, texts), timeout=timeout)
        return [list(embedding.values) for embedding in response.embeddings]


async def _responses(call: Any) -> AsyncGenerator[Any]:
    """Yields the responses of a call, and cancels it when the reader stops."""
    try:
        with calling(Reason.SERVICE_UNAVAILABLE):
            async for response in call:
                yield response
    finally:
        call.cancel()


def connect(target: str | None = None, *, home: Path | str | None = None, api_key: str | None = None) -> "Mesh":
    """Connects to the mesh at a gRPC target or on `home`. `api_key` replaces WEFT_API_KEY."""
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

    def stream_images(
        self, model: str, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> Iterator[event_pb2.InferenceEvent]:
        """Yields waits, progress, previews, and each image when it is complete; leaving the iterator cancels it."""
        request = image_request(model, prompt, options)
        for response in self._stream(self._stub.StreamImages(request, timeout=timeout)):
            yield from response.events

    def generate_images(
        self, model: str, prompt: str, *, timeout: float | None = None, **options: Unpack[ImageOptions]
    ) -> list[image_pb2.GeneratedImage]:
        """Returns the images when all are complete."""
        asked = image_request(model, prompt, options)
        request = pb.GenerateImagesRequest(model=model, payload=asked.payload, options=asked.options)
        return list(self._call(self._stub.GenerateImages, request, timeout).images)

    def stream_transcription(
        self, model: str, audio: bytes, *, timeout: float | None = None, **options: Unpack[TranscriptionOptions]
    ) -> Iterator[event_pb2.InferenceEvent]:
        """Yields transcribed words, waits and progress; leaving the iterator cancels the request."""
        request = transcription_request(model, audio, options)
        for response in self._stream(self._stub.StreamTranscription(request, timeout=timeout)):
            yield from response.events

    def transcribe(
        self, model: str, audio: bytes, *, timeout: float | None = None, **options: Unpack[TranscriptionOptions]
    ) -> audio_pb2.Transcription:
        """Returns the whole transcription of a recording."""
        asked = transcription_request(model, audio, options)
        request = pb.TranscribeRequest(model=model, payload=asked.payload, options=asked.options)
        transcription: audio_pb2.Transcription = self._call(self._stub.Transcribe, request, timeout).transcription
        return transcription

    def speak(
        self, model: str, text: str, *, timeout: float | None = None, **options: Unpack[SpeechOptions]
    ) -> Iterator[pb.SpeakResponse]:
        """Streams the spoken text: first its `media_type`, then the audio, last the `receipt`."""
        yield from self._stream(self._stub.Speak(speech_request(model, text, options), timeout=timeout))

    def embed(self, model: str, texts: Sequence[str], *, timeout: float | None = None) -> list[list[float]]:
        """Returns one vector per text."""
        response = self._call(self._stub.Embed, embed_request(model, texts), timeout)
        return [list(embedding.values) for embedding in response.embeddings]
