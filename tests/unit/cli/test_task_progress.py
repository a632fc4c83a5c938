"""How far a task is with an image or a recording, on the command line."""

import pytest

from weft.api.common.v1 import event_pb2
from weft.api.router.v1 import task_pb2
from weft.documents.codec import document_of
from weft_app.cli.tasks import progress_of


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        ({"unit": event_pb2.WORK_UNIT_STEPS, "done": 10, "total": 20}, "10/20 steps"),
        ({"unit": event_pb2.WORK_UNIT_AUDIO_SECONDS, "done": 12.5}, "12.5 s of audio"),
        ({"unit": event_pb2.WORK_UNIT_CHARACTERS, "done": 3, "total": 9}, "3/9 characters"),
        ({"done": 1, "total": 2, "stage": "behind 2 prompts of others"}, "1/2, behind 2 prompts of others"),
    ],
)
def test_progress_is_shown_in_its_unit(progress: dict[str, float], words: str) -> None:
    task = task_pb2.Task(id="task-1", progress=event_pb2.WorkProgress(**progress))  # type: ignore[arg-type]
    assert progress_of(document_of(task)) == words


def test_task_without_progress_shows_no_progress() -> None:
    assert progress_of(document_of(task_pb2.Task(id="task-1"))) == ""
