"""Types of the generation stream, and which events count as content."""

from collections.abc import Iterable

from weft.api.common.v1 import audio_pb2, chat_pb2, completion_pb2, event_pb2, image_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Frame = list[event_pb2.InferenceEvent]
"""Events that are sent together."""
MAX_JOINED_TEXTS = 1024
"""Maximum number of texts joined in one delta (`Delta.piece_lengths`)."""
MAX_JOINED_CHARS = 65_536
"""Maximum characters of joined text: at most 256 KiB. A longer text is sent alone."""
GenerationPayload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload


def is_content(delta: event_pb2.Delta) -> bool:
    """Whether a delta is part of the answer itself, which rules out failover."""
    is_part = delta.text or delta.reasoning or delta.refusal or delta.tool_calls
    return bool(is_part or delta.reasoning_signature or delta.redacted_reasoning)


def is_seal(delta: event_pb2.Delta) -> bool:
    """Whether a delta has reasoning that a provider signed or encrypted."""
    return bool(delta.reasoning_signature or delta.redacted_reasoning)


def has_content(frame: Frame) -> bool:
    """Whether a frame has a part of the answer itself, or an irreversible effect of it."""
    return any(map(_is_final, frame))


_FINAL = frozenset({"tool_call", "tool_result", "signal", "partial_image", "image", "transcript", "speech"})
"""Events that rule out a retry: a tool may have acted, a signal may have been handled, and media is the answer."""


def _is_final(event: event_pb2.InferenceEvent) -> bool:
    kind = event.WhichOneof("event")
    return is_content(event.delta) if kind == "delta" else kind in _FINAL


def texts_of(delta: event_pb2.Delta) -> list[str]:
    """Returns the texts joined in a delta, or its text. Raises BACKEND_PROTOCOL_ERROR if the lengths do not fit."""
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
    """Splits each delta of a frame that joins texts into one event per text. Raises as `texts_of`."""
    if not [event for event in frame if event.delta.piece_lengths]:
        return frame
    events: Frame = []
    for event in frame:
        if not event.delta.piece_lengths:
            events.append(event)
            continue
        for text in texts_of(event.delta):
            single = event_pb2.InferenceEvent()
            delta = single.delta
            delta.text, delta.index = text, event.delta.index
            events.append(single)
    return events


def collected_images(frames: Iterable[Frame]) -> list[image_pb2.GeneratedImage]:
    """Returns the complete images, ordered by index."""
    images = [event.image for frame in frames for event in frame if event.HasField("image")]
    return sorted(images, key=lambda image: image.index)


def collected_transcription(frames: Iterable[Frame]) -> audio_pb2.Transcription:
    """Returns the transcription merged from all frames."""
    parts = [event.transcript for frame in frames for event in frame if event.HasField("transcript")]
    return audio_pb2.Transcription(
        text="".join(part.text for part in parts).strip(),
        language=next((part.language for part in parts if part.language), ""),
        duration_seconds=next((part.duration_seconds for part in parts if part.duration_seconds), 0.0),
        segments=[part.segment for part in parts if part.HasField("segment")],
    )
