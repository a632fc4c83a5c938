"""The state of one answer of an engine: which of its choices have ended, how, and whether it is complete. Pure.

    choice:  open ──finish reason──▶ ended          answer:  open ──every choice ended, end of stream──▶ closed

An engine's stream is untrusted input. Content is checked strictly; an unreadable finish reason is only recorded as a
doubt:

- A missing, null or empty finish reason means "not yet". A stream that ends like this was cut off, unless [DONE] ends
it: then a choice with content ends in doubt. - A finish reason that reports a failure is an engine error.
Any other unknown one does not end its choice; at the end of the stream the choice ends in doubt. - Content for an ended
choice (text, reasoning or a call) is an error. If several finish reasons arrive, one that means a cut answer takes
precedence, else the first. - `tool_calls` without a call is an error. `stop` on a choice with calls becomes
`tool_calls`. - An empty answer is only valid if the engine reports its usage.
"""

import re
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from weft.kernel.errors.error_tree import WeftError, quoting_engine
from weft.kernel.errors.reasons import Reason


class Finish(Enum):
    """Why a choice ended."""

    __hash__ = object.__hash__  # As of `Form`.
    STOP = auto()
    LENGTH = auto()
    TOOL_CALLS = auto()
    CONTENT_FILTER = auto()
    FAILURE = auto()
    """The engine failed, such as with vLLM's `abort`; an error, no end."""


_WORDS: Mapping[str, Finish] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                *("stop", "end", "complete", "completed", "finished"),
                *("end_turn", "pause_turn", "stop_sequence"),  # Anthropic's API behind a bridge
                *("eos", "eos_token", "stop_token", "stop_string"),  # Together, text-generation-inference, watsonx
            ),
            Finish.STOP,
        ),
        # Cohere, watsonx, vLLM, which stops a model that repeats itself
        **dict.fromkeys(("error_limit", "not_finished", "repetition"), Finish.LENGTH),
        "length": Finish.LENGTH,
        **dict.fromkeys(("tool_calls", "tool_call", "tool_use", "function_call", "function_calls"), Finish.TOOL_CALLS),
        # Gemini
        **dict.fromkeys(("recitation", "blocklist", "spii", "language", "model_armor"), Finish.CONTENT_FILTER),
        # DeepSeek, Gemini
        **dict.fromkeys(("insufficient_system_resource", "missing_thought_signature"), Finish.FAILURE),
        **dict.fromkeys(("unexpected_tool_call", "too_many_tool_calls"), Finish.FAILURE),
    }
)
"""Finish reasons that are not read by their stems, and the most frequent one, as `_plain` writes them."""
_STEMS: Mapping[Finish, re.Pattern[str]] = MappingProxyType(
    {
        Finish.CONTENT_FILTER: re.compile(
            r"filter|safety|refus|sensitiv|prohibit|blocked|moderat|guardrail|toxic|polic(?:y|ies)"
        ),
        Finish.FAILURE: re.compile(
            r"error|fail|abort|cancel|malformed|timed?_?out|deadline|unavailable|overload|rate_limit|quota"
        ),
        Finish.LENGTH: re.compile(r"length|limit|max_|exceed|truncat|context|budget"),
    }
)
"""Parts of other words, in the order in which they are tried: engines add words, and reported as `stop`, a cut answer
would pass for a whole one."""
CUTTING = frozenset({Finish.LENGTH, Finish.CONTENT_FILTER})
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_PREFIXES = ("finish_reason_", "finish_reason.", "finishreason.", "stop_reason_")


def _plain(word: str) -> str:
    """Returns a finish reason in lower case with underscores, without the name of its type."""
    if word in _WORDS:
        return word
    plain = _CAMEL.sub("_", word.strip()[:MAX_WORD_CHARS]).lower().replace("-", "_").replace(" ", "_")
    return next((plain.removeprefix(each) for each in _PREFIXES if plain.startswith(each)), plain)


def _finish_of(plain: str) -> Finish | None:
    """Returns what a word means; None: unknown."""
    return _WORDS.get(plain) or next((finish for finish, stems in _STEMS.items() if stems.search(plain)), None)


_NOT_YET = frozenset({"", "null", "none"})
MAX_WORD_CHARS = 40
"""Maximum length of an unknown finish reason or role in an error."""
_OTHER_SPEAKERS = frozenset({"user", "system", "developer", "tool", "function"})


class AnswerState:
    """The choices of one answer. Call `take` for every chunk and `close` at the end of the stream."""

    def __init__(self, expected_choices: int) -> None:
        self._expected_choices = expected_choices
        self._ended: dict[int, Finish] = {}
        self._called: set[int] = set()
        self._begun: set[int] = set()
        """Choices with content."""
        self._words: dict[int, str] = {}
        """Unknown finish reasons by choice."""
        self.doubts: dict[int, str] = {}
        """Choices that ended without a known finish reason, with the engine's word for it; empty: none."""

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._ended) >= self._expected_choices

    def has_begun(self, index: int) -> bool:
        """Whether a choice has content."""
        return index in self._begun

    @property
    def ends(self) -> Mapping[int, Finish]:
        """Finish reasons of the ended choices, in the order in which they ended."""
        return self._ended

    def take(self, index: int, word: str | None, *, has_content: bool, has_call: bool = False) -> None:
        """Records a chunk of a choice. Raises BACKEND_PROTOCOL_ERROR or BACKEND_ERROR if it is invalid."""
        if index >= self._expected_choices:
            raise _fault(f"there is no choice {index}")
        ended = self._ended.get(index)
        if ended is not None and has_content:
            raise _fault(f"the engine continued choice {index} after its finish reason")
        if has_content:
            self._begun.add(index)
        if has_call:
            self._called.add(index)
        if not word or (plain := _plain(word)) in _NOT_YET:
            return
        reason = _finish_of(plain)
        if reason is Finish.FAILURE:
            failed = WeftError(
                Reason.BACKEND_ERROR, f"the engine ended choice {index} with finish_reason {quoted(word)}"
            )
            raise quoting_engine(failed, f"the engine ended choice {index} with an error")
        if reason is None:
            self._words[index] = word
        elif ended is None or (reason in CUTTING and ended not in CUTTING):
            self._ended[index] = reason

    def leave_out_missing(self) -> None:
        """Expects only the choices that have begun, if they are the first ones."""
        begun = self._begun | self._ended.keys()
        if begun and begun == set(range(len(begun))):
            self._expected_choices = len(begun)

    def close(self, *, has_figures: bool, is_done: bool) -> None:
        """Ends the answer. Raises BACKEND_PROTOCOL_ERROR if it is cut off or empty.

        `has_figures`: whether the engine reported its usage; `is_done`: whether it sent [DONE].
        """
        for index in range(self._expected_choices):
            if index not in self._ended and (index in self._words or (is_done and index in self._begun)):
                self._ended[index], self.doubts[index] = Finish.STOP, self._words.get(index, "")
        if not self.is_complete:
            count, expected = len(self._ended), self._expected_choices
            raise _fault(f"the engine ended the stream with {count} of {expected} choices finished")
        for index, reason in self._ended.items():
            if reason is Finish.TOOL_CALLS and index not in self._called:
                raise _fault(f"the engine ended choice {index} for a tool call and sent none")
            if reason is Finish.STOP and index in self._called:
                self._ended[index] = Finish.TOOL_CALLS
        is_empty = not self._begun and not has_figures
        if is_empty and all(reason is Finish.STOP for reason in self._ended.values()):
            raise _fault("the engine sent an empty answer: no text, no tool call and no usage")


def require_assistant(role: str | None) -> None:
    """Raises BACKEND_PROTOCOL_ERROR for a chunk of a role other than the assistant.

    Unknown roles, such as "model" or "ai", are accepted as the engine's name for the assistant.
    """
    if role in _OTHER_SPEAKERS:
        raise _fault(f"the engine sent a delta of the role {quoted(role)}, not of the assistant")


def quoted(word: str) -> str:
    """Returns an engine's text, shortened for an error."""
    return repr(word[:MAX_WORD_CHARS] + ("..." if len(word) > MAX_WORD_CHARS else ""))


def _fault(message: str) -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
