"""Enums and values that describe a request everywhere in the mesh."""

from enum import IntEnum
from typing import Literal

from weft.kernel.value import value_class

CHARS_PER_TOKEN = 4.0
"""A usual figure for English text and byte-pair vocabularies; what an answer really took corrects it in the router."""
PREFIX_ENDS = (*range(1_024, 33 * 1_024, 1_024), *range(36 * 1_024, 164 * 1_024, 4 * 1_024))
"""Characters after which the beginnings of a prompt end that are compared: every 256 tokens, from 8,192 tokens on every
1,024, up to 40,960 tokens."""


class Priority(IntEnum):
    """The priority class of a request; lower numbers first."""

    SYSTEM = 0
    """The mesh's own work. No caller can claim it."""
    HIGH = 1
    NORMAL = 2
    LOW = 3
    DURABLE = 4
    """Durable tasks: below all interactive requests, with their own share. No caller can claim it."""

    @property
    def wire(self) -> int:
        """Its number in `common.v1.Priority`, where 0 means unset."""
        return _WIRES.get(self, self.value)

    @staticmethod
    def from_wire(number: int) -> "Priority | None":
        """Returns the class of a number in `common.v1.Priority`, normal for unset; None: an unknown number."""
        return _BANDS.get(number)


_WIRES = {Priority.SYSTEM: 4, Priority.DURABLE: 5}
_BANDS = {0: Priority.NORMAL, **{band.wire: band for band in Priority}}
CALLER_BANDS = frozenset({Priority.HIGH, Priority.NORMAL, Priority.LOW})
"""Classes that callers may request."""


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
"""Names of operations in documents and in the configuration."""
TEXT_OPERATIONS = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.EMBEDDING})
"""Usual operations of servers of language models."""
TASK_OPERATIONS = TEXT_OPERATIONS | {Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH}
"""Operations whose requests can be durable tasks."""


class JournalMode(IntEnum):
    """Whether requests are durable tasks without their callers asking for it; numbers as in `registry.v1`.

    A higher one demands more: of several models that may answer a request, the highest counts.
    """

    UNSET = 0
    """As another setting says."""
    NONE = 1
    WAIT = 2
    """Each is a task while its caller waits; a caller who disconnects cancels it."""
    KEEP = 3
    """The same, and a task whose caller disconnects continues."""


JournalWord = Literal["none", "wait", "keep"]
"""Values of the setting `journal` in the configuration."""


def journal_mode_of(word: JournalWord | None) -> JournalMode:
    """Returns the mode of a setting; UNSET for one that is absent."""
    return JournalMode.UNSET if word is None else JournalMode[word.upper()]


def journal_in(number: int) -> JournalMode:
    """Returns the mode of a message; one that this version does not know demands as much as there is."""
    return JournalMode(number) if number <= JournalMode.KEEP else JournalMode.KEEP


class CacheMode(IntEnum):
    """Whether a request uses the prefix cache; numbers as in `common.v1.CacheMode`."""

    AUTO = 1
    PREFIX = 2
    NONE = 3


@value_class(kw_only=True)
class Handling:
    """Options of a request for its runner; by default as the model is configured."""

    cache_mode: CacheMode = CacheMode.AUTO
    cache_tag: str = ""
    """Cached prefixes are shared only among requests of one tenant with the same tag."""
    keep_alive_seconds: float | None = None
    """How long the model stays loaded afterwards; negative: until it is unloaded; None: as it is configured."""
