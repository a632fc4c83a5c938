"""Digests of ever longer beginnings of a prompt: how much of one begins another, without keeping either."""

import hashlib
from collections.abc import Iterator

from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import GenerationPayload

MARK_BYTES = 512
"""Finer ones would cost more than they find: engines reuse prefixes of any length, but a short one is soon computed."""
MAX_MARKS = 128
"""What is behind the first 64 KiB of a prompt decides nothing any more."""
_DIGEST_BYTES = 8


def prompt_marks(payload: GenerationPayload) -> tuple[bytes, ...]:
    """Marks at every MARK_BYTES and at the end of every message; equal marks up to one mean an equal beginning."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    marks: list[bytes] = []
    for piece in _pieces(payload):
        for begin in range(0, max(1, len(piece)), MARK_BYTES):
            digest.update(piece[begin : begin + MARK_BYTES])
            marks.append(digest.digest())
            if len(marks) == MAX_MARKS:
                return tuple(marks)
    return tuple(marks)


def _pieces(payload: GenerationPayload) -> Iterator[bytes]:
    """What templates put first, first."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        for prompt in payload.prompts:
            yield prompt.text.encode() if prompt.WhichOneof("kind") == "text" else prompt.SerializeToString()
        return
    if payload.tools:
        yield b"".join(tool.SerializeToString() for tool in payload.tools)
    for message in payload.messages:
        yield bytes([message.role]) + b"".join(_part(part) for part in message.content)
        if message.tool_calls:
            yield b"".join(call.SerializeToString() for call in message.tool_calls)


def _part(part: chat_pb2.ContentPart) -> bytes:
    return part.text.encode() if part.WhichOneof("kind") == "text" else part.SerializeToString()
