"""Detection of repetition in answers, with the action of the agent's policy: warn or kill."""

import re

from runner_svc.chat.receipt import warning
from runner_svc.chat.settings import ChatSettings, RepetitionPolicy
from runner_svc.policy.repetition import Repetition, RepetitionDetector, RepetitionLimits
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, event_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_SAMPLE_CHARS = 100
MIN_ASKED_CHARS = 12
"""Minimum length of a repeated line that counts as requested by the caller: shorter ones match by chance."""
MAX_ASKED_CHARS = 16_384
"""Length of the caller's text that is searched."""
_WORD = re.compile(r"\w+")
_POLICIES = {policy.value: policy for policy in RepetitionPolicy}


class RepetitionWatch:
    """Watches the choices of one turn, reasoning and call arguments included."""

    def __init__(self, *, kills: bool, limits: RepetitionLimits | None = None, asked: str = "") -> None:
        """`asked`: the caller's text. A repeated line that it contains causes a warning at most."""
        self._kills = kills
        self._limits = limits
        self._asked = asked
        self._detectors: dict[int, RepetitionDetector] = {}
        self._untold: list[Repetition] = []

    def look(self, frame: Frame) -> warning_pb2.Warning | None:
        """Take the next frame. Returns a warning once per choice that repeats; raises REPEATED_LINE_LOOP to kill."""
        # Once per frame and choice, not per token: this is on the hot path.
        written: dict[int, list[str]] = {}
        for event in frame:
            if event.HasField("delta") and (text := _written(delta := event.delta)):
                written.setdefault(delta.index, []).append(text)
        for choice, pieces in written.items():
            detector = self._detectors.get(choice)
            if detector is None:
                detector = self._detectors[choice] = RepetitionDetector(self._limits)
            if (found := detector.feed("".join(pieces))) is not None:
                self._untold.append(found)
        return self._verdict(self._untold.pop(0)) if self._untold else None

    def _verdict(self, found: Repetition) -> warning_pb2.Warning:
        what = "a line" if found.kind == "line" else "a piece of text"
        message = f"the model repeats {what}, {found.count} times so far: {_cut(found.sample)!r}"
        if self._kills and not self._was_asked_for(found.sample):
            metadata = {"count": str(found.count), "sample": _cut(found.sample)}
            raise WeftError(Reason.REPEATED_LINE_LOOP, message, metadata=metadata)
        return warning(warning_pb2.WARNING_CODE_REPETITION, message)

    def _was_asked_for(self, sample: str) -> bool:
        words = _words(sample)
        return len(words) >= MIN_ASKED_CHARS and words in _words(self._asked)


def repetition_watch(
    behaviour: agent_behaviour_pb2.AgentBehaviour, settings: ChatSettings, payload: GenerationPayload
) -> RepetitionWatch | None:
    """Returns a watch by the agent's policy, else the model's; None: the policy is off."""
    # An enum value that this runner does not know counts as unset.
    policy = _POLICIES.get(behaviour.repetition_policy, settings.repetition)
    if policy is RepetitionPolicy.OFF:
        return None
    kills = policy is RepetitionPolicy.KILL
    return RepetitionWatch(kills=kills, limits=settings.repetition_limits, asked=_asked(payload) if kills else "")


def _asked(payload: GenerationPayload) -> str:
    """Returns the last user message of a chat; empty for a completion, whose prompt the model continues."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return ""
    last = next((each for each in reversed(payload.messages) if each.role == chat_pb2.ROLE_USER), None)
    return "" if last is None else "\n".join(part.text for part in last.content)[:MAX_ASKED_CHARS]


def _words(text: str) -> str:
    """Returns the words of a text without punctuation, which makes no difference between lines."""
    return " ".join(_WORD.findall(text.casefold()))


def _written(delta: event_pb2.Delta) -> str:
    return delta.text or delta.reasoning or "".join(call.arguments_text for call in delta.tool_calls)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + "..."
