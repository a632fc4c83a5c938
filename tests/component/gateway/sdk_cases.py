"""Answers of the mesh, complete or failing at any point, for the clients' own readers."""

from dataclasses import dataclass, field

from gateway_script import Frame, Step, delta, finished, queued, started, usage
from hypothesis import strategies as st

from weft.api.common.v1 import event_pb2, warning_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

REASONS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALLS": "tool_calls", "CONTENT_FILTER": "content_filter"}
TEXT = st.text(alphabet=st.sampled_from('ab é😀"\\\n\r\u2028{}[]:,\x00data: '), max_size=6)
LATE = (Reason.WORKER_LOST, Reason.STALL_TIMEOUT, Reason.BACKEND_ERROR, Reason.INTERNAL, Reason.CONTEXT_LENGTH_EXCEEDED)


@dataclass(frozen=True)
class Case:
    """A script for the dispatcher, and the expected outcome of its answer."""

    choices: int
    frames: list[Frame]
    failure: Exception | None
    fails_at: int
    """Before which frame; len(frames): after the last."""
    ends_early: bool
    """Whether the frames end there without an error."""
    finish_reasons: dict[int, str] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        told: list[Step] = list(self.frames[: self.fails_at])
        return told if self.failure is None else [*told, self.failure]

    @property
    def is_complete(self) -> bool:
        return self.fails_at >= len(self.frames)


def _logprob(token: str) -> event_pb2.TokenLogprob:
    top = [event_pb2.TopLogprob(token="x", logprob=float("-inf"))]
    return event_pb2.TokenLogprob(token=token, logprob=-0.5, raw_bytes=token.encode(), top=top)


@st.composite
def _piece(draw: st.DrawFn, index: int, calls: int) -> event_pb2.InferenceEvent:
    kind = draw(st.sampled_from(["text", "reasoning", "refusal", "call", "both", "logprob", "nothing"]))
    text = draw(TEXT)
    if kind == "reasoning":
        return delta(index=index, reasoning=text)
    if kind == "refusal":
        return delta(index=index, refusal=text)
    if kind == "both":
        return delta(text, index=index, reasoning=draw(TEXT))
    if kind == "logprob":
        return delta(text, index=index, logprobs=[_logprob(text), _logprob("b")])
    if kind == "call" and calls:
        numbers = draw(st.lists(st.integers(0, calls - 1), min_size=1, max_size=3))
        pieces = [
            event_pb2.ToolCallDelta(index=number, id=f"c{number}", name=f"f{number}", arguments_text=draw(TEXT))
            for number in numbers
        ]
        return delta(index=index, tool_calls=pieces)
    return delta(text if kind == "text" else "", index=index)


def _aside() -> st.SearchStrategy[event_pb2.InferenceEvent]:
    warning = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_REPETITION, message="again\nand again")
    return st.sampled_from(
        [
            queued(),
            event_pb2.InferenceEvent(loading=event_pb2.Loading(stage="weights\n\ndata: x")),
            event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=4, processed_tokens=2)),
            event_pb2.InferenceEvent(warning=warning),
            event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(id="t", name="files.read")),
            event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(id="t", content="x")),
            usage(),
        ]
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any order of chunks of any choices, in any frames, ending or failing at any point."""
    choices = draw(st.integers(1, 3))
    queues = []
    finish_reasons = {}
    for index in range(choices):
        pieces = draw(st.lists(_piece(index, draw(st.integers(0, 3))), max_size=6))
        reason = draw(st.sampled_from(sorted(REASONS)))
        finish_reasons[index] = REASONS[reason]
        queues.append([*pieces, delta(draw(TEXT) if draw(st.booleans()) else "", index=index, finish=reason)])
    events = [started()]
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        events.append(queue.pop(0))
        if draw(st.integers(0, 3)) == 0:
            events.append(draw(_aside()))
    events += [usage(cached=5, reasoning=1), finished()]
    frames: list[Frame] = [[]]
    for event in events:
        frames[-1].append(event)
        if draw(st.booleans()):
            frames.append([])
    frames = [frame for frame in frames if frame]
    fails_at = draw(st.one_of(st.just(len(frames)), st.integers(0, len(frames) - 1)))
    failure: Exception | None = None
    if fails_at < len(frames):
        error = WeftError(draw(st.sampled_from(LATE)), "the worker\nis gone")
        failure = draw(st.sampled_from([error, RuntimeError("a fault of ours"), None]))
    return Case(choices, frames, failure, fails_at, failure is None and fails_at < len(frames), finish_reasons)
