"""Estimates the tokens of an answer that ends before its engine reports them."""

from weft.api.common.v1 import event_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.request import CHARS_PER_TOKEN


class TokenCounter:
    """Counts the tokens of a turn by its chunks: engines send one per token. Joined chunks count by length."""

    def __init__(self, payload: GenerationPayload, *, whole: bool) -> None:
        """`whole`: the answer is not streamed, so its chunks may have been joined."""
        self._payload = payload
        self._whole = whole
        self._progress: event_pb2.Progress | None = None
        self._pieces = 0
        self._chars = 0

    @property
    def has_begun(self) -> bool:
        """Whether the engine has visibly worked on the request."""
        return self._progress is not None or self._pieces > 0

    def note(self, frame: Frame) -> None:
        """Counts another frame of the engine."""
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                delta = event.delta
                calls = delta.tool_calls
                written = len(delta.text) + len(delta.reasoning) + len(delta.refusal)
                if calls:
                    written += sum(len(call.arguments_text) for call in calls)
                self._pieces += len(delta.piece_lengths) or bool(written or calls)
                self._chars += written
            elif kind == "progress":
                self._progress = event.progress

    @property
    def usage(self) -> usage_pb2.Usage:
        """Returns the counts so far. Prompt tokens are the engine's count if it reported one, else an estimate."""
        progress = self._progress or event_pb2.Progress()
        joined = int(self._chars / CHARS_PER_TOKEN) if self._whole else 0
        return usage_pb2.Usage(
            prompt_tokens=progress.prompt_tokens or estimated_prompt_tokens(self._payload),
            cached_prompt_tokens=progress.cached_tokens,
            completion_tokens=max(self._pieces, joined),
        )
