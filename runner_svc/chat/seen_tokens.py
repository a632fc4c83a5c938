"""What a turn has cost by as much as was seen of it, for turns that are ended before the engine tells its figures."""

from weft.api.common.v1 import event_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.payload_description import CHARS_PER_TOKEN, estimated_prompt_tokens


class SeenTokens:
    """Counts the pieces of one turn: engines send one per token. Where several came as one, their length tells more."""

    def __init__(self, payload: GenerationPayload, *, whole: bool) -> None:
        """`whole`: nobody reads the answer before it is complete, so pieces that came together have been joined."""
        self._payload = payload
        self._whole = whole
        self._progress: event_pb2.Progress | None = None
        self._pieces = 0
        self._chars = 0

    def note(self, frame: Frame) -> None:
        """The next frame of the engine."""
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                delta = event.delta
                written = len(delta.text) + len(delta.reasoning) + len(delta.refusal)
                written += sum(len(call.arguments_text) for call in delta.tool_calls)
                self._pieces += bool(written or delta.tool_calls)
                self._chars += written
            elif kind == "progress":
                self._progress = event.progress

    @property
    def usage(self) -> usage_pb2.Usage:
        """The counts so far. The prompt is the engine's count where it told one, and else an estimate of its length."""
        progress = self._progress or event_pb2.Progress()
        joined = int(self._chars / CHARS_PER_TOKEN) if self._whole else 0
        return usage_pb2.Usage(
            prompt_tokens=progress.prompt_tokens or estimated_prompt_tokens(self._payload),
            cached_prompt_tokens=progress.cached_tokens,
            completion_tokens=max(self._pieces, joined),
        )
