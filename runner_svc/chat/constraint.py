"""Whether an answer keeps the format that its request asks for.

Engines leave out what their grammars cannot hold, and providers may ignore a format, so the complete answer is checked.
An answer that was cut, withheld by a filter or refused says so itself and is not checked. Grammars in an engine's own
language are the engine's.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from runner_svc.chat.receipt import MAX_NOTED, counts_of
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.value_check import UncheckedError, ValueCheck, matches, parsed
from weft.kernel.text.json_objects import plain_object

MAX_CHECKED_CHARS = 1_048_576
"""Maximum length of a checked answer, or of the arguments of a checked call."""
MAX_CPU_SECONDS = 1.0
"""Maximum processor time of one check, which runs in a thread."""
MAX_ANSWER_CPU_SECONDS = 4.0
"""Processor time for the checks of an answer with all its choices and calls. After it, no further check begins."""
_MAX_WARNING_CHARS = 500
_CUT = (event_pb2.FINISH_REASON_LENGTH, event_pb2.FINISH_REASON_CONTENT_FILTER)
_JSON_OBJECT: Mapping[str, Any] = MappingProxyType({"type": "object"})
_MET, _CHECKED = warning_pb2.WARNING_CODE_CONSTRAINT_NOT_MET, warning_pb2.WARNING_CODE_CONSTRAINT_NOT_CHECKED

FindProblem = Callable[[str], str]
"""Returns why a text does not have a format; empty: it has. Raises ValueError for a text that is not JSON."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format that texts must have."""

    find_problem: FindProblem
    is_strict: bool = False
    name: str = ""
    """The engine parameter that asks for it; empty: a field of the API."""


def with_kept_format(frames: AsyncGenerator[Frame], payload: GenerationPayload) -> AsyncGenerator[Frame]:
    """Returns the frames of an answer, whose end is held back until its format has been checked.

    Raises CONSTRAINT_NOT_MET after the text if a format with `strict` is not kept. Adds a warning for another one, and
    for what could not be checked.
    """
    if isinstance(payload, chat_pb2.ChatPayload) and not (
        payload.tools or payload.extra_parameters.fields or payload.HasField("response_format")
    ):
        return frames
    formats = list(_formats(payload))
    functions = {
        tool.function.name: Format(_of_schema(plain_object(tool.function.parameters)), is_strict=True)
        for tool in (payload.tools if isinstance(payload, chat_pb2.ChatPayload) else ())
        if tool.function.strict
    }
    return _checked(frames, _Answer(payload, formats, functions)) if formats or functions else frames


async def _checked(frames: AsyncGenerator[Frame], answer: "_Answer") -> AsyncGenerator[Frame]:
    async with aclosing(frames):
        async for frame in frames:
            if out := answer.read(frame):
                yield out
    # In a thread: a check may take as much processor time as it is allowed.
    found = await asyncio.to_thread(lambda: list(answer.broken()))
    error = next((warning.message for warning, is_error in found if is_error), None)
    if error is None:
        yield answer.end([warning for warning, _ in found])
        return
    usage = answer.receipt.usage
    yield [event_pb2.InferenceEvent(usage=usage)]
    raise WeftError(Reason.CONSTRAINT_NOT_MET, error, metadata=counts_of(usage))


def _formats(payload: GenerationPayload) -> Iterator[Format]:
    if isinstance(payload, chat_pb2.ChatPayload):
        wanted = payload.response_format
        form = wanted.WhichOneof("kind")
        if form == "json_object":
            yield Format(_of_schema(_JSON_OBJECT))
        elif form == "json_schema":
            yield Format(_of_schema(plain_object(wanted.json_schema.schema)), is_strict=wanted.json_schema.strict)
    if not payload.extra_parameters.fields:
        return
    extra = plain_object(payload.extra_parameters)
    nested = extra.get("structured_outputs")
    for name, value in (extra | (nested if isinstance(nested, dict) else {})).items():
        kind = name.removeprefix("guided_")
        if kind in {"json", "json_schema"} and isinstance(schema := _decoded(value), dict):
            yield Format(_of_schema(schema), name=name)
        elif kind == "regex" and isinstance(value, str):
            yield Format(_of_pattern(value), name=name)
        elif kind == "choice" and isinstance(value, list):
            yield Format(_of_choice([str(each) for each in value]), name=name)


def _decoded(schema: object) -> object:
    """Parses a schema that is given as JSON text, as some engines allow."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError):
        return None


def _of_schema(schema: Mapping[str, Any]) -> FindProblem:
    check = ValueCheck(schema, max_cpu_seconds=MAX_CPU_SECONDS)
    return lambda text: check.problem(parsed(text))


def _of_pattern(pattern: str) -> FindProblem:
    return lambda text: "" if matches(pattern, text) else "it does not match the pattern"


def _of_choice(texts: list[str]) -> FindProblem:
    return lambda text: "" if text in texts else "it is none of the choices"


@dataclass(slots=True)
class _Choice:
    """The text and the calls of one choice."""

    pieces: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, list[str]]] = field(default_factory=dict)
    """Name and arguments by index."""
    is_refused: bool = False
    finish: int = 0


class _Answer:
    """An answer, and its events that are held back from its first finish reason on."""

    def __init__(self, payload: GenerationPayload, formats: Sequence[Format], functions: Mapping[str, Format]) -> None:
        self._formats = formats
        self._functions = functions
        self._begins_with = _beginning(payload)
        self._may_stop = bool(payload.sampling.stop)
        self._choices: dict[int, _Choice] = {}
        self._held: Frame = []
        self.receipt = receipt_pb2.Receipt()

    def read(self, frame: Frame) -> Frame:
        """Takes the next frame; returns what can be sent."""
        out: Frame = []
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta":
                self._note(event.delta)
            elif kind == "tool_call":
                # The texts so far were said before a tool of the mesh ran.
                self._choices.clear()
            elif kind == "finished":
                self.receipt = event.finished.receipt
            # A finish reason comes in an event without content. Counts before it belong to an answer that fails.
            is_end = kind == "finished" or bool(event.delta.finish_reason) or (kind == "usage" and bool(self._held))
            (self._held if is_end else out).append(event)
        return out

    def _note(self, delta: event_pb2.Delta) -> None:
        choice = self._choices.setdefault(delta.index, _Choice())
        choice.pieces.append(delta.text)
        choice.is_refused = choice.is_refused or bool(delta.refusal)
        choice.finish = delta.finish_reason or choice.finish
        for piece in delta.tool_calls:
            choice.calls.setdefault(piece.index, (piece.name, []))[1].append(piece.arguments_text)

    def end(self, warnings: Sequence[warning_pb2.Warning]) -> Frame:
        """Returns the events held back, with warnings before them and in the receipt."""
        self.receipt.warnings.extend(warnings[: max(0, MAX_NOTED - len(self.receipt.warnings))])
        return [*(event_pb2.InferenceEvent(warning=each) for each in warnings), *self._held]

    def broken(self) -> Iterator[tuple[warning_pb2.Warning, bool]]:
        """Yields a warning for each format that is not kept or was not checked, and whether it is an error."""
        ends_at = time.thread_time() + MAX_ANSWER_CPU_SECONDS
        for check in self._checks():
            if time.thread_time() > ends_at:
                message = "the rest of the answer was not checked for its format: the checks take too long"
                yield warning_pb2.Warning(code=_CHECKED, message=message), False
                return
            yield from check()

    def _checks(self) -> Iterator[Callable[[], Iterator[tuple[warning_pb2.Warning, bool]]]]:
        for _, choice in sorted(self._choices.items()):
            if choice.is_refused or choice.finish in _CUT:
                continue
            for name, pieces in choice.calls.values():
                if (wanted := self._functions.get(name)) is not None:
                    yield partial(_broken, wanted, f"the arguments of {name[:64]}", "".join(pieces).strip() or "{}")
            if not choice.calls and choice.finish != event_pb2.FINISH_REASON_TOOL_CALLS:
                text = "".join(choice.pieces)
                for wanted in self._formats:
                    yield partial(_broken, wanted, "the answer", text, self._begins_with, may_stop=self._may_stop)


def _broken(
    wanted: Format, what: str, text: str, begins_with: str = "", *, may_stop: bool = False
) -> Iterator[tuple[warning_pb2.Warning, bool]]:
    """Yields what is wrong with a text. `may_stop`: a stop string of the caller may have ended it."""
    problem, code, is_error = "", _MET, wanted.is_strict
    try:
        if len(text) > MAX_CHECKED_CHARS:
            raise UncheckedError(f"it has more than {MAX_CHECKED_CHARS:,} characters")  # noqa: TRY301 - as the others
        problem = wanted.find_problem(text)
    except ValueError as error:
        problem, is_error = f"it is not JSON: {error}", wanted.is_strict and not may_stop
    except (UncheckedError, RecursionError) as error:
        problem, code, is_error = str(error), _CHECKED, False
    if problem and begins_with and not any(_broken(wanted, what, begins_with + text)):
        return
    if problem:
        words = "does not keep the format of the request" if code == _MET else "was not checked for its format"
        message = f"{what} {words}: {problem}"[:_MAX_WARNING_CHARS]
        yield warning_pb2.Warning(code=code, field=wanted.name, message=message), is_error


def _beginning(payload: GenerationPayload) -> str:
    """Returns the text of a model's turn at the end of the conversation, which the answer continues."""
    if not isinstance(payload, chat_pb2.ChatPayload) or not payload.messages:
        return ""
    last = payload.messages[-1]
    return "".join(part.text for part in last.content) if last.role == chat_pb2.ROLE_ASSISTANT else ""
