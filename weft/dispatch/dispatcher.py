"""Runs a request: gets a grant, calls the runner itself, fails over before the first content, writes the receipt.

The router decides and never sees a token; the frames of a runner pass through here untouched. `request_call` has what
all kinds of requests share; `generation_call`, `unary_call` and `speech_call` have the kinds.
"""

from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch import unary_call
from weft.dispatch.fleet import FleetSource
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.generation_call import GenerationCall
from weft.dispatch.journey import RequestContext
from weft.dispatch.port import PlacementPort
from weft.dispatch.request_call import CallTools, waiting_event
from weft.dispatch.speech_call import SpeechCall
from weft.dispatch.steady import SteadyConfig
from weft.dispatch.unary_call import EmbeddingCall, UnaryCall
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.rpc import ChannelPool

__all__ = ["Dispatcher", "EmbeddingCall", "GenerationCall", "SpeechCall", "UnaryCall", "waiting_event"]


class Dispatcher:
    """Turns requests into calls. One per process that has callers: each gateway, each router.

    Nothing happens until a call's frames or pieces are read, or its result is awaited.
    """

    def __init__(
        self,
        placement: PlacementPort,
        channels: ChannelPool,
        *,
        clock: Clock | None = None,
        steady: SteadyConfig | None = None,
        fleet: FleetSource | None = None,
    ) -> None:
        """`fleet` knows the agents; without one there are none."""
        self._tools = CallTools(placement, channels, clock or SystemClock(), steady or SteadyConfig(), fleet)

    def generate(self, context: RequestContext, payload: GenerationPayload) -> GenerationCall:
        """A chat or text completion."""
        return GenerationCall(self._tools, context, payload)

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> EmbeddingCall:
        """Vectors, in input order."""
        return UnaryCall(self._tools, context, payload, unary_call.EMBED)

    def rerank(
        self, context: RequestContext, payload: rerank_pb2.RerankPayload
    ) -> UnaryCall[list[rerank_pb2.RerankScore]]:
        """Scores of documents, the best first."""
        return UnaryCall(self._tools, context, payload, unary_call.RERANK)

    def tokenize(
        self, context: RequestContext, payload: tokenize_pb2.TokenizePayload
    ) -> UnaryCall[tokenize_pb2.TokenizeResult]:
        """Tokens of a text or of a conversation."""
        return UnaryCall(self._tools, context, payload, unary_call.TOKENIZE)

    def generate_images(
        self, context: RequestContext, payload: image_pb2.ImagePayload
    ) -> UnaryCall[list[image_pb2.GeneratedImage]]:
        """Images."""
        return UnaryCall(self._tools, context, payload, unary_call.GENERATE_IMAGES)

    def transcribe(
        self, context: RequestContext, payload: audio_pb2.TranscriptionPayload
    ) -> UnaryCall[audio_pb2.Transcription]:
        """Words of a recording."""
        return UnaryCall(self._tools, context, payload, unary_call.TRANSCRIBE)

    def speak(self, context: RequestContext, payload: audio_pb2.SpeechPayload) -> SpeechCall:
        """Spoken words."""
        return SpeechCall(self._tools, context, payload)
