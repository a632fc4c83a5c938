"""The types of a generation stream that every hop uses: requests, frames, and what counts as content."""

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2

Frame = list[event_pb2.InferenceEvent]
"""Events that travel together."""
GenerationPayload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload


def is_content(delta: event_pb2.Delta) -> bool:
    """Whether a delta is part of the answer itself, after which there is no failover."""
    return bool(delta.text or delta.reasoning or delta.refusal or delta.tool_calls or is_seal(delta))


def is_seal(delta: event_pb2.Delta) -> bool:
    """Whether a delta has what a provider has signed or encrypted of the reasoning."""
    return bool(delta.reasoning_signature or delta.redacted_reasoning)


def has_content(frame: Frame) -> bool:
    """Whether any event of a frame is part of the answer itself, or an effect of it that cannot be taken back."""
    return any(map(_is_final, frame))


_FINAL = frozenset({"tool_call", "tool_result", "signal", "partial_image", "image", "transcript", "speech"})
"""Kinds that are never repeated: a tool may have done something, a signal may have been acted upon, and media are the
answer."""


def _is_final(event: event_pb2.InferenceEvent) -> bool:
    kind = event.WhichOneof("event")
    return is_content(event.delta) if kind == "delta" else kind in _FINAL
