"""Looks out for answers that repeat themselves over and over, and does what the policy says."""

from runner_svc.chat.answer_receipt import warning
from runner_svc.chat.settings import RepetitionPolicy
from runner_svc.policy.repetition import Repetition, RepetitionDetector
from weft.api.common.v1 import agent_behaviour_pb2, event_pb2, warning_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_SAMPLE_CHARS = 100
_POLICIES = {policy.value: policy for policy in RepetitionPolicy}


class RepetitionWatch:
    """Watches the choices of one turn. Reasoning and arguments of calls count too: models get stuck there as well."""

    def __init__(self, *, kills: bool) -> None:
        self._kills = kills
        self._detectors: dict[int, RepetitionDetector] = {}
        self._untold: list[Repetition] = []

    def look(self, frame: Frame) -> warning_pb2.Warning | None:
        """Look at the next frame. A warning once per choice that repeats itself; raises REPEATED_LINE_LOOP to kill."""
        # Once per frame and choice, not per token: this is on the way of every one of them.
        written: dict[int, list[str]] = {}
        for event in frame:
            if event.HasField("delta") and (text := _written(delta := event.delta)):
                written.setdefault(delta.index, []).append(text)
        for choice, pieces in written.items():
            detector = self._detectors.get(choice)
            if detector is None:
                detector = self._detectors[choice] = RepetitionDetector()
            if (found := detector.feed("".join(pieces))) is not None:
                self._untold.append(found)
        return self._verdict(self._untold.pop(0)) if self._untold else None

    def _verdict(self, found: Repetition) -> warning_pb2.Warning:
        what = "a line" if found.kind == "line" else "a piece of text"
        message = f"the model repeats {what}, {found.count} times so far: {_cut(found.sample)!r}"
        if self._kills:
            metadata = {"count": str(found.count), "sample": _cut(found.sample)}
            raise WeftError(Reason.REPEATED_LINE_LOOP, message, metadata=metadata)
        return warning(warning_pb2.WARNING_CODE_REPETITION, message)


def repetition_watch(
    behaviour: agent_behaviour_pb2.AgentBehaviour, policy_of_model: RepetitionPolicy
) -> RepetitionWatch | None:
    """A watch by the agent's policy, else the model's; None: nobody looks."""
    # A number that is newer than this runner counts as none.
    policy = _POLICIES.get(behaviour.repetition_policy, policy_of_model)
    return None if policy is RepetitionPolicy.OFF else RepetitionWatch(kills=policy is RepetitionPolicy.KILL)


def _written(delta: event_pb2.Delta) -> str:
    return delta.text or delta.reasoning or "".join(call.arguments_text for call in delta.tool_calls)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SAMPLE_CHARS else text[:MAX_SAMPLE_CHARS] + "..."
