"""The state of one answer of an engine: which of its choices have ended, how, and whether it is complete. Pure.

    choice:  open ──finish reason──▶ ended          answer:  open ──every choice ended, end of stream──▶ closed

An engine's stream is untrusted input. What is unknown is an error with a reason, and never a natural end:

- No finish reason, null or "" is "not yet". A stream that ends so is cut off.
- An unknown finish reason is an error that names it: of the engine where it reports a failure (FAILURES), of the
  protocol otherwise.
- An ended choice accepts nothing more. Text, reasoning or a call for it is an error; so is another finish reason. The
  same finish reason once more is ignored, as servers repeat it with their figures.
- `tool_calls` without a call is an error.
- An empty answer is valid only where the engine reports its usage.
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class Finish(Enum):
    """Why a choice ended."""

    STOP = auto()
    LENGTH = auto()
    TOOL_CALLS = auto()
    CONTENT_FILTER = auto()


FINISH_REASONS: Mapping[str, Finish] = MappingProxyType(
    {
        "stop": Finish.STOP,
        "eos": Finish.STOP,  # Together
        "eos_token": Finish.STOP,  # text-generation-inference
        "stop_sequence": Finish.STOP,  # text-generation-inference
        "length": Finish.LENGTH,
        "model_length": Finish.LENGTH,  # Mistral
        "tool_calls": Finish.TOOL_CALLS,
        "function_call": Finish.TOOL_CALLS,
        "content_filter": Finish.CONTENT_FILTER,
    }
)
FAILURES = frozenset({"error", "abort", "aborted", "cancelled", "failed"})
"""Finish reasons by which engines report a failure; vLLM and SGLang write `abort`."""
MAX_WORD_CHARS = 40
"""Length of an unknown finish reason or role in an error."""
_OTHER_SPEAKERS = frozenset({"user", "system", "developer", "tool", "function"})


class AnswerState:
    """The choices of one answer. `take` is called for every chunk, `close` at the end of the stream."""

    def __init__(self, expected_choices: int) -> None:
        self._expected_choices = expected_choices
        self._ended: dict[int, Finish] = {}
        self._called: set[int] = set()
        self._has_content = False

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._ended) >= self._expected_choices

    @property
    def ends(self) -> Mapping[int, Finish]:
        """The finish reasons of the ended choices, in the order of their ends."""
        return self._ended

    def take(self, index: int, word: str | None, *, has_content: bool, has_call: bool = False) -> None:
        """Take a chunk of a choice. Raises BACKEND_PROTOCOL_ERROR or BACKEND_ERROR for an invalid one."""
        if index >= self._expected_choices:
            raise _fault(f"there is no choice {index}")
        ended = self._ended.get(index)
        if ended is not None and has_content:
            raise _fault(f"the engine went on with choice {index} after its finish reason")
        self._has_content = self._has_content or has_content
        if has_call:
            self._called.add(index)
        if not word:
            return
        reason = FINISH_REASONS.get(word)
        if reason is None:
            kind = Reason.BACKEND_ERROR if word.lower() in FAILURES else Reason.BACKEND_PROTOCOL_ERROR
            raise WeftError(kind, f"the engine ended choice {index} with finish_reason {quoted(word)}")
        if ended is not None and ended is not reason:
            raise _fault(f"the engine gave choice {index} a second finish reason, {quoted(word)}")
        self._ended[index] = reason

    def close(self, *, has_figures: bool) -> None:
        """End the answer. Raises BACKEND_PROTOCOL_ERROR where it is cut off or empty.

        `has_figures`: whether the engine has reported its usage.
        """
        if not self.is_complete:
            count, expected = len(self._ended), self._expected_choices
            raise _fault(f"the engine ended the stream with {count} of {expected} choices finished")
        for index, reason in self._ended.items():
            if reason is Finish.TOOL_CALLS and index not in self._called:
                raise _fault(f"the engine ended choice {index} for a tool call and sent none")
        stopped = all(reason is Finish.STOP for reason in self._ended.values())
        if stopped and not self._has_content and not has_figures:
            raise _fault("the engine sent an answer with nothing in it: no text, no tool call and no usage")


def require_assistant(role: str | None) -> None:
    """Raise BACKEND_PROTOCOL_ERROR for a chunk of another role than the assistant.

    Unknown roles are the engine's own name for the assistant ("model", "ai") and pass.
    """
    if role in _OTHER_SPEAKERS:
        raise _fault(f"the engine sent a piece of the role {quoted(role)}, not of the assistant")


def quoted(word: str) -> str:
    """Returns an engine's text, shortened for an error."""
    return repr(word[:MAX_WORD_CHARS] + ("..." if len(word) > MAX_WORD_CHARS else ""))


def _fault(message: str) -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
