"""The types of a generation stream that every hop uses: requests, frames, and what counts as content."""

from collections.abc import Iterable

from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2, event_pb2, image_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Frame = list[event_pb2.InferenceEvent]
"""Events that travel together."""
MAX_JOINED_TEXTS = 1024
"""Maximum number of texts that one delta joins (`Delta.piece_lengths`)."""
MAX_JOINED_CHARS = 65_536
"""Maximum length of the text of such a delta in characters: 256 KiB at most. A longer text comes alone, as it is."""
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


def texts_of(delta: event_pb2.Delta) -> list[str]:
    """Returns the texts that a delta joins, or its own. Raises BACKEND_PROTOCOL_ERROR for lengths that do not fit."""
    text, texts, at = delta.text, [], 0
    if not delta.piece_lengths:
        return [text]
    for length in delta.piece_lengths:
        texts.append(text[at : at + length])
        at += length
    if at != len(text) or "" in texts or len(texts) > MAX_JOINED_TEXTS:
        problem = f"the runner sent {len(texts)} lengths, {at} characters in all, for a text of {len(text)} characters"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, problem)
    return texts


def apart(frame: Frame) -> Frame:
    """Returns a frame with an event for each text that a delta of it joins. Raises as `texts_of`."""
    if not any(map(_joins, frame)):
        return frame
    events: Frame = []
    for event in frame:
        if not _joins(event):
            events.append(event)
            continue
        for text in texts_of(event.delta):
            single = event_pb2.InferenceEvent()
            delta = single.delta
            delta.text, delta.index = text, event.delta.index
            events.append(single)
    return events


def _joins(event: event_pb2.InferenceEvent) -> bool:
    return event.HasField("delta") and bool(event.delta.piece_lengths)


def collected_images(frames: Iterable[Frame]) -> list[image_pb2.GeneratedImage]:
    """Returns the complete images, in the order of their numbers."""
    images = [event.image for frame in frames for event in frame if event.HasField("image")]
    return sorted(images, key=lambda image: image.index)


def collected_transcription(frames: Iterable[Frame]) -> audio_pb2.Transcription:
    """Returns the transcription of all pieces."""
    parts = [event.transcript for frame in frames for event in frame if event.HasField("transcript")]
    return audio_pb2.Transcription(
        text="".join(part.text for part in parts).strip(),
        language=next((part.language for part in parts if part.language), ""),
        duration_seconds=next((part.duration_seconds for part in parts if part.duration_seconds), 0.0),
        segments=[part.segment for part in parts if part.HasField("segment")],
    )
