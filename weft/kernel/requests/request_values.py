"""Enums and values that describe a request."""

from enum import IntEnum
from typing import Literal

from weft.kernel.values.fast_dataclass import fast_dataclass

CHARS_PER_TOKEN = 4.0
"""Typical for English text and byte-pair vocabularies. The router corrects it with actual usage."""
PREFIX_ENDS = (*range(1_024, 33 * 1_024, 1_024), *range(36 * 1_024, 164 * 1_024, 4 * 1_024))
"""Lengths, in characters, of the prompt prefixes that are compared: every 256 tokens, above 8,192 every 1,024, up to
40,960."""


class Priority(IntEnum):
    """Priority class of a request; lower numbers first."""

    SYSTEM = 0
    """Internal work of the mesh. Not available to callers."""
    HIGH = 1
    NORMAL = 2
    LOW = 3
    DURABLE = 4
    """Durable tasks: below all interactive requests, with a separate share. Not available to callers."""

    @property
    def wire(self) -> int:
        """The number in `common.v1.Priority`, where 0 means unset."""
        return _WIRES[self]

    @staticmethod
    def from_wire(number: int) -> "Priority | None":
        """Returns the class for a number in `common.v1.Priority`: NORMAL for unset, None for an unknown number."""
        return _BANDS.get(number)

    @staticmethod
    def ceiling(number: int) -> "Priority":
        """Returns the class for a number in `common.v1.PriorityCeiling`: HIGH for unset."""
        return Priority(number) if number in (Priority.NORMAL, Priority.LOW) else Priority.HIGH

    @property
    def as_ceiling(self) -> int:
        """The number in `common.v1.PriorityCeiling`: 0, unset, for HIGH."""
        return 0 if self is Priority.HIGH else self.value

    def within(self, ceiling: "Priority") -> "Priority":
        """Returns this class, or the ceiling if a caller's class is above it."""
        return ceiling if Priority.HIGH <= self < ceiling else self


_WIRES = {band: int(band) for band in Priority} | {Priority.SYSTEM: 4, Priority.DURABLE: 5}
_BANDS = {0: Priority.NORMAL, **{band.wire: band for band in Priority}}
CALLER_CLASSES = (Priority.HIGH, Priority.NORMAL, Priority.LOW)
"""Priority classes that callers may request."""


class Skill(IntEnum):
    """Optional abilities of a model; numbers as in `registry.v1.ModelSkill`."""

    TEXT = 1
    IMAGE = 2
    AUDIO = 3
    TOOLS = 4


class Operation(IntEnum):
    """Operations of a model; numbers as in `registry.v1.ModelOperation`."""

    CHAT = 1
    COMPLETION = 2
    EMBEDDING = 3
    RERANK = 4
    TOKENIZE = 5
    IMAGE = 6
    TRANSCRIPTION = 7
    SPEECH = 8


OperationName = Literal["chat", "completion", "embedding", "rerank", "tokenize", "image", "transcription", "speech"]
"""Operation names in documents and the configuration."""
TEXT_OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING})
"""Operations that language model servers usually have."""
TASK_OPERATIONS = TEXT_OPERATIONS | {Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH}
"""Operations that durable tasks support."""


class JournalMode(IntEnum):
    """Whether requests become durable tasks automatically; numbers as in `registry.v1`.

    If several models may answer a request, the highest mode applies.
    """

    UNSET = 0
    NONE = 1
    WAIT = 2
    """Each request is a task; a caller who disconnects cancels it."""
    KEEP = 3
    """Each request is a task, and continues if its caller disconnects."""


JournalWord = Literal["none", "wait", "keep"]
"""Values of the setting `journal`."""


def journal_mode_of(word: JournalWord | None) -> JournalMode:
    """Returns the mode of a setting; UNSET if it is absent."""
    return JournalMode.UNSET if word is None else JournalMode[word.upper()]


def journal_in(number: int) -> JournalMode:
    """Returns the mode in a message; KEEP for an unknown number."""
    return JournalMode(number) if number <= JournalMode.KEEP else JournalMode.KEEP


class CacheMode(IntEnum):
    """Whether a request uses the prefix cache; numbers as in `common.v1.CacheMode`."""

    AUTO = 1
    PREFIX = 2
    NONE = 3


@fast_dataclass(kw_only=True)
class Handling:
    """Options of a request for its runner; the defaults follow the model's configuration."""

    cache_mode: CacheMode = CacheMode.AUTO
    cache_tag: str = ""
    """Requests share cached prefixes only within one tenant and tag."""
    keep_alive_seconds: float | None = None
    """How long the model stays loaded afterwards; negative: until it is unloaded; None: as configured."""
    keep_alive_ignored: bool = False
    """Whether the request had a keep-alive that its caller may not set."""
    prefix_seconds: float = 0.0
    """How long the prompt's beginning, its tools and system messages, is expected again; 0: it is not."""
