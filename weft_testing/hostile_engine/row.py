"""One row of the catalogue: the bytes an engine answers with, and what the caller must see."""

from dataclasses import dataclass
from enum import Enum

from weft.kernel.reasons import Reason, traits
from weft_testing.hostile_engine.server import DONE, LAST_CHUNK, STREAM_HEAD, USAGE, chunked, end, piece

PROTOCOL = Reason.BACKEND_PROTOCOL_ERROR
FAILED = Reason.BACKEND_ERROR
REJECTED = Reason.BACKEND_REJECTED


class Ask(Enum):
    """What the engine is asked for."""

    CHAT = "chat"
    TWO_CHOICES = "two choices of a chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    RERANK = "rerank"
    TOKENIZE = "tokenize"
    IMAGE = "image"
    TRANSCRIPTION = "transcription"
    SPEECH = "speech"


@dataclass(frozen=True, kw_only=True)
class Row:
    """An answer and its verdict. The answer is the same whether the caller reads it as a stream or whole."""

    name: str
    answer: bytes
    """Head and body; empty: the connection is reset."""
    sees: Reason | None
    """The reason of the error that the caller gets; None: a good answer, whose text is `text`."""
    text: str = ""
    ask: Ask = Ask.CHAT
    ends: bool = True
    """Whether the connection is closed after the answer."""

    @property
    def status(self) -> int:
        """The HTTP status that a caller of the mesh gets where nothing was sent before."""
        return 200 if self.sees is None else traits(self.sees).http_status


def stream(*events: bytes, head: bytes = STREAM_HEAD, last: bytes = LAST_CHUNK) -> bytes:
    """A stream of these pieces of a body, each a chunk of its own."""
    return head + b"".join(map(chunked, events)) + last


def cut(*events: bytes) -> bytes:
    """A stream that ends in mid-body."""
    return stream(*events, last=b"")


HI = piece("Hi")
GOOD = (HI, end(), USAGE, DONE)
"""The pieces of an answer in order."""
