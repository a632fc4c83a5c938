"""Shared parts of image and audio commands: files, choice of the model, progress, and durable tasks."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.router.v1.task_pb2 import Task, TaskSpec
from weft.client.tasks import Tasks, connect_tasks, has_ended
from weft.documents.codec import word_of
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.values.units import time_words
from weft_app.cli.completion import complete_model
from weft_app.cli.mesh_api import connect
from weft_app.cli.options import EXIT_INTERRUPTED
from weft_app.cli.output import ProgressStyle, shown_progress
from weft_app.cli.terminal import note, safe_text, say, tell

OUTPUT_OPTION, FETCH_OPTION = "--output", "--fetch"
STANDARD = "-"
"""Standard input or output."""
MAX_MEDIA_BYTES = 60 * 1024 * 1024
"""Maximum file size in a request; a message of the mesh has at most 64 MiB."""
MAX_TIMEOUT_SECONDS = 86_400.0
DetachOption = Annotated[
    bool, typer.Option("--detach", help="Submit a durable task, print its id, and exit; --fetch writes its result.")
]
FetchOption = Annotated[
    str, typer.Option(FETCH_OPTION, metavar="TASK", help="Wait for a task of --detach, and write its result.")
]
ModelOption = Annotated[str, typer.Option("--model", help="Default: the only model.", autocompletion=complete_model)]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.001, max=MAX_TIMEOUT_SECONDS, help="Deadline in seconds.")
]
_MAX_SLUG_CHARS = 48
_TENTHS = 10


@dataclass(frozen=True, slots=True)
class MediaOperation:
    """An operation of models."""

    word: str
    does: str
    """What a model with this operation does, such as "makes images"."""
    engines: str


IMAGES = MediaOperation("image", "makes images", "diffusers (`weft runtime install diffusers`)")
TRANSCRIPTIONS = MediaOperation(
    "transcription", "transcribes recordings", "faster_whisper (`weft runtime install faster_whisper`)"
)
SPEECH = MediaOperation("speech", "speaks", "piper (`weft runtime install speech`)")


def chosen_model(asked: str, operation: MediaOperation, home: Path) -> str:
    """Returns the given model, or the only one (or pool) with the operation, with a note on stderr.

    Raises MODEL_NOT_FOUND if there is none, INVALID_ARGUMENT naming --model if there are several.
    """
    if asked:
        return asked
    with connect(home) as mesh:
        models = mesh.documents(ResourceKind.MODEL)
    found = [each for each in models if operation.word in each.get("operations", ())]
    able = [model for model in found if model["status"]["state"] == "active"] or found
    if not able:
        message = f"no model of this mesh {operation.does}; runtimes that do: {operation.engines}; "
        raise WeftError(Reason.MODEL_NOT_FOUND, f"{message}docs/media.md has the models for weft.yaml")
    names, pools = sorted(str(model["name"]) for model in able), {str(model["status"]["pool"]) for model in able}
    if len(names) > 1 and len(pools) > 1:
        raise invalid_field("--model", f"name one of {', '.join(names)}")
    name = names[0] if len(names) == 1 else pools.pop()
    note(f"model {name}")
    return name


def given_options(given: Mapping[str, Any]) -> Any:
    """Returns the given options of a request."""
    return {name: value for name, value in given.items() if value not in (None, "", False)}


def read_media(path: Path, field: str, advice: str = "") -> bytes:
    """Returns the bytes of a file, or of standard input for `-`.

    Raises INVALID_ARGUMENT naming `field` if it is missing or empty, REQUEST_TOO_LARGE above MAX_MEDIA_BYTES.
    """
    try:
        if str(path) == STANDARD:
            data = sys.stdin.buffer.read(MAX_MEDIA_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_MEDIA_BYTES + 1)
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not data:
        raise invalid_field(field, f"{path} is empty")
    if len(data) > MAX_MEDIA_BYTES:
        message = f"{path} is larger than {MAX_MEDIA_BYTES // 1024**2} MiB{advice}"
        raise FieldError(field, message, Reason.REQUEST_TOO_LARGE)
    return data


def numbered(path: Path, count: int) -> list[Path]:
    """Returns the paths of several files: NAME-1.png, NAME-2.png ..., or the path itself for one."""
    if count == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, count + 1)]


def free_paths(stem: str, suffix: str, count: int) -> list[Path]:
    """Returns unused paths in the current folder: STEM.png, else STEM_2.png ..."""
    number = 1
    while True:
        tail = "" if number == 1 else f"_{number}"
        paths = numbered(Path(f"{stem}{tail}.{suffix}"), count)
        if not any(map(os.path.lexists, paths)):
            return paths
        number += 1


def slug(text: str) -> str:
    """Returns a text as the stem of a file name; `image` for one without letters and digits."""
    words = re.sub(r"[\W_]+", "-", text.lower()).strip("-")
    return words[:_MAX_SLUG_CHARS].strip("-") or "image"


def require_writable(paths: list[Path], *, force: bool) -> None:
    """Raises ALREADY_EXISTS for an existing file, unless `force`, and INVALID_ARGUMENT for a missing folder."""
    for path in paths:
        if not path.parent.is_dir():
            raise invalid_field(OUTPUT_OPTION, f"there is no folder {path.parent}")
        if path.is_dir():
            raise invalid_field(OUTPUT_OPTION, f"{path} is a folder; name a file")
        if os.path.lexists(path) and not force:
            raise WeftError(
                Reason.ALREADY_EXISTS, f"{path} exists; use --force to overwrite it, or -o for another file"
            )


@contextmanager
def written(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Yields a file that gets its name when the block succeeds. Raises as `require_writable`.

    Until then it is PATH.part, which is removed if the block fails. A pipe or device is written directly.
    """
    target = path.resolve()
    part = target.with_name(f"{target.name}.part")
    try:
        if path.exists() and not path.is_file():
            require_writable([path], force=force)
            with path.open("wb") as file:
                yield file
            return
        with part.open("wb") as file:
            yield file
        require_writable([path], force=force)
        part.replace(target)
    except OSError as error:
        raise invalid_field(OUTPUT_OPTION, f"{path} cannot be written: {(error.strerror or '').lower()}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def stopped(what: str, state: str = "cancelled") -> NoReturn:
    """Ends a command after Ctrl-C with the state of its request."""
    tell("\n")
    note(f"{state}; {what}")
    raise typer.Exit(EXIT_INTERRUPTED)


_UNITS = {event_pb2.WORK_UNIT_STEPS: "steps", event_pb2.WORK_UNIT_AUDIO_SECONDS: "s of audio"}


def _state(event: event_pb2.InferenceEvent) -> str:
    """Returns the state of a request in an event; empty for other events."""
    match event.WhichOneof("event"):
        case "queued":
            return safe_text(f"queued, position {event.queued.position}: {event.queued.reason}")
        case "loading":
            share = f" {event.loading.progress:.0%}" if event.loading.HasField("progress") else ""
            return safe_text(f"loading{share}: {event.loading.stage}")
        case "started":
            return safe_text(f"working on {event.started.runner}")
        case "work_progress":
            return safe_text(event.work_progress.stage or "working")
        case _:
            return ""


def _line(event: event_pb2.InferenceEvent) -> str:
    """Returns the line of a state; of progress one line per 10 %."""
    work, text = event.work_progress, _state(event)
    if not work.total:
        return text
    tenth = int(_TENTHS * work.done / work.total)
    return f"{text}: {tenth * _TENTHS} % of {work.total:.4g} {_UNITS.get(work.unit, '')}".rstrip()


def _bar(event: event_pb2.InferenceEvent) -> Mapping[str, Any]:
    work = event.work_progress
    counted = f"{work.done:.4g}/{work.total:.4g} {_UNITS.get(work.unit, '')}" if work.total else ""
    description = _state(event).replace("[", r"\[")
    return {"description": description, "total": work.total or None, "completed": work.done, "counted": counted}


_WORK = ProgressStyle(
    line=_line,
    columns=lambda: (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
    ),
    bar=_bar,
)


@contextmanager
def shown_work(*, is_shown: bool = True) -> Iterator[Callable[[event_pb2.InferenceEvent], None]]:
    """Yields a function that shows waits and progress among events; warnings become notes."""
    with shown_progress(_WORK, is_shown=is_shown) as show:

        def show_event(event: event_pb2.InferenceEvent) -> None:
            if _state(event):
                show(event)
            elif event.HasField("warning"):
                note(f"warning: {safe_text(event.warning.message)}")

        yield show_event


def work_facts(receipt: receipt_pb2.Receipt) -> str:
    """Returns one line: the work, waits, the runner and the request's id, without unknown values."""
    usage, load = receipt.usage, receipt.load_wait.ToNanoseconds() / 1e9
    parts = (
        f"{usage.image_steps} steps" if usage.image_steps else "",
        f"{usage.image_pixels / 1e6:.2f} megapixels" if usage.image_pixels else "",
        f"{usage.audio_milliseconds / 1000:.1f} s of audio" if usage.audio_milliseconds else "",
        f"queue {time_words(receipt.queue_wait.ToNanoseconds() / 1e9)}",
        f"load {time_words(load)}" if load else "",
        f"{receipt.attempts[-1].runner} on {receipt.host}" if receipt.attempts else "",
        f"request {receipt.request_id}" if receipt.request_id else "",
    )
    return ", ".join(filter(None, parts))


def submit(asked: Any, kind: str, command: str, home: Path) -> None:
    """Submits a request as a task. Prints the id to stdout, and how to fetch the result to stderr."""
    spec: Any = {"model": asked.model, kind: asked.payload, "options": asked.options}
    with connect_tasks(home=home) as tasks:
        task = tasks.submit(TaskSpec(**spec))
    say(f"{task.id}\n")
    note(f"{word_of(task, 'state')}; `weft media {command} --fetch {task.id}` waits for it and writes its result")


def fetched(task_id: str, kind: str, home: Path) -> tuple[list[event_pb2.InferenceEvent], TaskSpec]:
    """Waits for a task. Returns its answer, with the content of its files, and its specification.

    Progress goes to stderr. `kind` is the required kind of the task, such as "image".
    Raises BACKEND_ERROR if it failed, CANCELLED if it was cancelled.
    """
    require_token(task_id, FETCH_OPTION, MAX_REQUEST_ID_CHARS)
    with connect_tasks(home=home) as tasks:
        spec = tasks.get(task_id).spec
        found = spec.WhichOneof("payload")
        if found != kind:
            raise invalid_field(FETCH_OPTION, f"task {task_id} is for {found}, not {kind}")
        try:
            events = _followed(tasks, task_id)
        except KeyboardInterrupt:
            stopped(f"the task continues, and `weft cancel task {task_id}` cancels it", "no longer waiting")
        for part in [event.image.image if event.HasField("image") else event.speech for event in events]:
            if part.file_id:
                part.data = b"".join(tasks.read_file(part.file_id))
    return events, spec


def _followed(tasks: Tasks, task_id: str) -> list[event_pb2.InferenceEvent]:
    """Follows a task to its end. Returns the events of the attempt that completed it."""
    task, attempt = Task(), 0
    events: list[event_pb2.InferenceEvent] = []
    with shown_work() as show:
        for news in tasks.watch(task_id):
            if isinstance(news, Task):
                task = news
                if task.HasField("progress"):
                    show(event_pb2.InferenceEvent(work_progress=task.progress))
                continue
            if news.attempt != attempt:
                # Output of a lost attempt is not part of the answer.
                attempt, events = news.attempt, []
            events += news.output.events
    state = word_of(task, "state")
    if not has_ended(task):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the mesh ended the watch of task {task_id}, which is {state}")
    if state != "completed":
        why = f": {safe_text(task.error.message)}" if task.HasField("error") else ""
        reason = Reason.CANCELLED if state == "cancelled" else Reason.BACKEND_ERROR
        raise WeftError(reason, f"task {task_id} {state}{why}")
    return events
