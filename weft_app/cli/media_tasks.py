"""Images, transcriptions and speech as durable tasks: submitted with --detach, their results read with --fetch."""

from collections.abc import Iterator
from pathlib import Path

from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2
from weft.api.router.v1.task_pb2 import Task, TaskSpec
from weft.client.tasks import Tasks, connect_tasks, has_ended
from weft.documents.codec import word_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.reasons import Reason
from weft_app.cli.media_output import stopped
from weft_app.cli.media_progress import shown_work
from weft_app.cli.options import note
from weft_app.cli.output import safe_text, say

FETCH_OPTION = "--fetch"


def submit(spec: TaskSpec, command: str, home: Path) -> None:
    """Submits a task: its id on stdout, and on stderr how its result is fetched."""
    with connect_tasks(home=home) as tasks:
        task = tasks.submit(spec)
    say(f"{task.id}\n")
    note(f"{word_of(task, 'state')}; `weft {command} --fetch {task.id}` waits for it and writes its result")


def fetched(task_id: str, kind: str, home: Path) -> tuple[list[event_pb2.InferenceEvent], TaskSpec]:
    """Returns the answer of a task once it has completed, with the content of its files, and what was submitted.

    Progress goes to stderr. `kind`: what the task must be about, such as "image". Raises BACKEND_ERROR where it failed,
    CANCELLED where it was cancelled.
    """
    require_token(task_id, FETCH_OPTION, MAX_REQUEST_ID_CHARS)
    with connect_tasks(home=home) as tasks:
        spec = tasks.get(task_id).spec
        found = spec.WhichOneof("payload")
        if found != kind:
            raise invalid_field(FETCH_OPTION, f"task {task_id} is about {found}, not {kind}")
        try:
            events = _followed(tasks, task_id)
        except KeyboardInterrupt:
            stopped(f"the task continues, and `weft cancel task {task_id}` ends it", "no longer waiting")
        for event in events:
            _fill(tasks, event)
    return events, spec


def _followed(tasks: Tasks, task_id: str) -> list[event_pb2.InferenceEvent]:
    """Follows a task to its end, and returns the events of the attempt that completed it."""
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
                # What a lost attempt had made is not part of the answer.
                attempt, events = news.attempt, []
            events += news.output.events
    _require_completed(task, task_id)
    return events


def _require_completed(task: Task, task_id: str) -> None:
    state = word_of(task, "state")
    if not has_ended(task):
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the mesh ended the watch of task {task_id}, which is {state}")
    if state != "completed":
        why = f": {safe_text(task.error.message)}" if task.HasField("error") else ""
        reason = Reason.CANCELLED if state == "cancelled" else Reason.BACKEND_ERROR
        raise WeftError(reason, f"task {task_id} {state}{why}")


def _fill(tasks: Tasks, event: event_pb2.InferenceEvent) -> None:
    """Puts the content of the file that an event names into the event."""
    for part in _parts(event):
        if part.file_id:
            part.data = b"".join(tasks.read_file(part.file_id))


def _parts(event: event_pb2.InferenceEvent) -> Iterator[chat_pb2.MediaPart | audio_pb2.SpeechPart]:
    if event.HasField("image"):
        yield event.image.image
    if event.HasField("speech"):
        yield event.speech
