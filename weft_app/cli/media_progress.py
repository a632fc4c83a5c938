"""Waits and progress of a request for images or a transcription, on stderr, and what it took."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft_app.cli.options import note
from weft_app.cli.output import safe_text
from weft_app.cli.progress import ProgressStyle, Show, shown_progress

_TENTHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkState:
    """What a request waits for, or how far it is."""

    text: str
    done: float = 0.0
    total: float = 0.0
    """0: unknown."""
    unit: str = ""


def state_of(event: event_pb2.InferenceEvent) -> WorkState | None:
    """Returns the state that an event reports; None: the event is about something else."""
    match event.WhichOneof("event"):
        case "queued":
            return WorkState(text=f"queued, position {event.queued.position}: {event.queued.reason}")
        case "loading":
            share = f" {event.loading.progress:.0%}" if event.loading.HasField("progress") else ""
            return WorkState(text=f"loading{share}: {event.loading.stage}")
        case "started":
            return WorkState(text=f"working on {event.started.runner}")
        case "work_progress":
            return _work(event.work_progress)
        case _:
            return None


def _work(progress: event_pb2.WorkProgress) -> WorkState:
    units = {event_pb2.WORK_UNIT_STEPS: "steps", event_pb2.WORK_UNIT_AUDIO_SECONDS: "s of audio"}
    return WorkState(
        text=progress.stage or "working",
        done=progress.done,
        total=progress.total,
        unit=units.get(progress.unit, ""),
    )


def _line(state: WorkState) -> str:
    """Returns the line of a state, of progress one in ten percent."""
    text = safe_text(state.text)
    if not state.total:
        return text
    tenth = int(_TENTHS * state.done / state.total)
    return f"{text}: {tenth * _TENTHS} % of {state.total:.4g} {state.unit}".rstrip()


def _bar(state: WorkState) -> Mapping[str, Any]:
    counted = f"{state.done:.4g}/{state.total:.4g} {state.unit}" if state.total else ""
    return {
        "description": safe_text(state.text).replace("[", r"\["),
        "total": state.total or None,
        "completed": state.done,
        "counted": counted,
    }


def _columns() -> Sequence[ProgressColumn]:
    return (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counted]}"), TimeElapsedColumn())


WORK_STYLE = ProgressStyle(line=_line, columns=_columns, bar=_bar)


@contextmanager
def shown_work(*, is_shown: bool = True) -> Iterator[Show]:
    """Yields the function that shows the waits and the progress among events; warnings become notes."""
    with shown_progress(WORK_STYLE, is_shown=is_shown) as show:

        def show_event(event: event_pb2.InferenceEvent) -> None:
            state = state_of(event)
            if state is not None:
                show(state)
            elif event.HasField("warning"):
                note(f"warning: {safe_text(event.warning.message)}")

        yield show_event


def work_facts(receipt: receipt_pb2.Receipt) -> str:
    """Returns one line: the work, waits, the runner and the request's id; unknown values are left out."""
    usage = receipt.usage
    parts = [f"{usage.image_steps} steps"] if usage.image_steps else []
    if usage.image_pixels:
        parts.append(f"{usage.image_pixels / 1e6:.2f} megapixels")
    if usage.audio_milliseconds:
        parts.append(f"{usage.audio_milliseconds / 1000:.1f} s of audio")
    parts.append(f"queue {receipt.queue_wait.ToNanoseconds() / 1e9:.2f} s")
    if load := receipt.load_wait.ToNanoseconds() / 1e9:
        parts.append(f"load {load:.2f} s")
    if receipt.attempts:
        parts.append(f"{receipt.attempts[-1].runner} on {receipt.host}")
    if receipt.request_id:
        parts.append(f"request {receipt.request_id}")
    return ", ".join(parts)
