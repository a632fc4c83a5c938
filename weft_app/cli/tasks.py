"""Durable tasks in the commands `get`, `describe`, `wait`, `cancel`, `logs` and `delete`."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path

import typer

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, process_name, require_token
from weft_app.cli.explain import retry_words, webhook_lines
from weft_app.cli.follow import RETRY_LIMIT_SECONDS, Breaks, poll_records
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.options import EXIT_FAILED, OutputFormat, ResourceFormat, act_on_each
from weft_app.cli.output import Listing, custom_columns, local, page, print_page, shortened
from weft_app.cli.short_ids import TASKS as TASK_IDS
from weft_app.cli.short_ids import full_id
from weft_app.cli.targets import record_ids
from weft_app.cli.terminal import note, safe_text, say, say_answer

TASKS = "/v1/admin/tasks"
CANCEL_TIMEOUT_SECONDS = 20.0
"""Timeout of a call, which waits until the cancelled task has ended."""
MAX_SHOWN = 1_000
RETRY_PAUSE_SECONDS = 0.5
_ENDS = ("completed", "failed", "cancelled")
_AWAY = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.CANCELLED})


_UNITS = {"steps": "steps", "audio_seconds": "s of audio", "characters": "characters"}


def progress_of(task: Document) -> str:
    """Returns the progress of a running task, such as "10/20 steps"; empty if unknown."""
    progress = task.get("progress")
    if not progress:
        return ""
    done = f"{progress['done']:g}/{progress['total']:g}" if progress["total"] else f"{progress['done']:g}"
    words = f"{done} {_UNITS.get(progress['unit'], '')}".strip()
    return f"{words}, {progress['stage']}" if progress.get("stage") else words


def _error(ended: Document) -> str:
    """Returns why a task or an attempt failed; empty if it did not."""
    error = ended.get("error")
    return f"{error['reason']}: {error['message']}" if error else ""


def _why(task: Document) -> str:
    return progress_of(task) or _error(task) or retry_words(task) or str(task.get("waitingFor", ""))


_TASK = custom_columns(
    "TASK:id STATE:state MODEL:model ATTEMPT? AGE:createdAt:age~ WORKER?",
    ATTEMPT=lambda task: f"{task['attempt']}/{task['maxAttempts']}",
    WORKER=lambda task: process_name(task.get("owner", "")),
)
_WIDE = _TASK + custom_columns(
    "TENANT:tenant BATCH API:originKind CALLER:caller USER:user WHY",
    BATCH=lambda task: f"{task['batch']}[{task['line']}]" if task.get("batch") else None,
    WHY=_why,
)
_PAGE = custom_columns(
    "Task:id State:state Model:model Tenant:tenant Batch Caller:caller User:user Metadata Request:requestId "
    "Submitted:createdAt:local Started:startedAt:local Ended:endedAt:local Fails_at Progress Waits_for:waitingFor "
    "Error Retry Attempts",
    Batch=lambda task: f"{task['batch']}, line {task['line']}" if task.get("batch") else None,
    Metadata=lambda task: ", ".join(f"{name}={value}" for name, value in task["metadata"].items()) or None,
    Fails_at=lambda task: f"{local(task['expiresAt'])} unless started by then" if "expiresAt" in task else None,
    Progress=lambda task: progress_of(task) or None,
    Error=lambda task: _error(task) or None,
    Retry=lambda task: retry_words(task) or None,
    Attempts=lambda task: f"{task['attempt']} (at most {task['maxAttempts']} may fail)",
)
_TITLE_CHARS = 10
_TASKS = Listing(
    columns=_TASK + custom_columns("WHY", WHY=lambda task: shortened(_why(task))),
    wide=_WIDE,
    name=lambda task: f"task/{task['id']}",
    empty="there are no such tasks; weft chat MODEL TEXT --async submits one",
)


def task_ids(words: Sequence[str]) -> list[str]:
    """Parses `task ID...` or `task/ID...`. Raises INVALID_ARGUMENT."""
    found = record_ids(
        words, "task", lambda word: invalid_field("NAME", f"{word[:64]!r} is not a task; write task/ID for each")
    )
    return [require_token(each, "ID", MAX_REQUEST_ID_CHARS) for each in found]


def one_task(words: Sequence[str]) -> str:
    """Returns the one task id. Raises INVALID_ARGUMENT for none or several."""
    ids = task_ids(words)
    if len(ids) != 1:
        raise invalid_field("ID", "name one task, as task ID or task/ID")
    return ids[0]


def _task(api: MeshApi, word: str) -> Document:
    """Returns a task by its id or the beginning of it."""
    found: Document = api.get(f"{TASKS}/{full_id(api, TASK_IDS, word)}")
    return found


def show_tasks(
    words: Sequence[str],
    output: ResourceFormat,
    states: Sequence[str],
    home: Path,
    *,
    caller: str = "",
    watch: bool = False,
) -> None:
    """Prints the named tasks; without names, the newest ones (of one caller).

    `watch`: until Ctrl-C, with each that changes.
    """
    ids = task_ids(words)

    def read() -> Document:
        with connect(home) as api:
            if ids:
                return {"items": [_task(api, each) for each in ids]}
            return dict(api.get(TASKS, state=",".join(states), caller=caller, limit=MAX_SHOWN))

    if watch:
        poll_records(_TASKS, output, lambda: read()["items"])
    found = read()
    _TASKS.print(found["items"], output, lambda: found["items"][0] if len(ids) == 1 else found)
    if notice := found.get("notice"):
        note(f"warning: {safe_text(notice)}")


def describe_task(words: Sequence[str], output: OutputFormat, home: Path) -> None:
    """Prints the details of a task."""
    with connect(home) as api:
        found = _task(api, one_task(words))
    attempts = [f"  {attempt['attempt']}. {_attempt_words(attempt)}" for attempt in found["attempts"]]
    lines = (*page(_PAGE, found, _TITLE_CHARS), *attempts, *webhook_lines(found.get("webhook")), "")
    print_page(output, lambda: "\n".join(lines), lambda: found)


def _attempt_words(attempt: Document) -> str:
    receipt = attempt.get("receipt", {})
    tried = receipt.get("attempts", ())
    runners = [each["runner"] + (f" ({each['reason']})" if "reason" in each else "") for each in tried]
    claimed = f"claimed {local(attempt['claimedAt'])} by {process_name(attempt.get('owner', ''))}"
    claimed += f", on {', '.join(runners)}" if runners else ""
    if error := _error(attempt):
        return f"{claimed}, {error}"
    if "endedAt" not in attempt:
        return claimed
    if "promptTokens" not in receipt:
        return f"{claimed}, completed"
    about = "~" if receipt.get("promptEstimated") else ""
    usage = f"{about}{receipt['promptTokens']} + {receipt['completionTokens']} tokens"
    return f"{claimed}, completed, {usage}"


def cancel_tasks(words: Sequence[str], home: Path, output: OutputFormat) -> None:
    """Cancels tasks and prints the outcome of each. A failure of one does not stop the others."""

    def cancel_one(api: MeshApi, task_id: str) -> None:
        task = api.post(f"{TASKS}/{task_id}/cancel")
        state = task["state"] if task["state"] == "cancelled" else f"had already {task['state']}"
        print_page(output, lambda: f"task/{task_id} {state}\n", lambda: task)

    _for_each(words, home, cancel_one)


def delete_tasks(words: Sequence[str], home: Path, *, ignore_not_found: bool) -> None:
    """Deletes finished tasks."""

    def delete(api: MeshApi, task_id: str) -> None:
        api.delete(f"{TASKS}/{task_id}")
        say(f"task/{task_id} deleted\n")

    _for_each(words, home, delete, ignored=(Reason.NOT_FOUND,) if ignore_not_found else ())


def _for_each(
    words: Sequence[str], home: Path, act: Callable[[MeshApi, str], None], *, ignored: Collection[Reason] = ()
) -> None:
    ids = task_ids(words)
    if not ids:
        raise invalid_field("ID", "name the tasks, as task ID... or task/ID...")
    with connect(home, CANCEL_TIMEOUT_SECONDS) as api:
        act_on_each(ids, lambda each: act(api, full_id(api, TASK_IDS, each)), ignored=ignored)


def wait_for_task(words: Sequence[str], expected: str | None, timeout_seconds: float, home: Path) -> None:
    """Waits until a task has ended, or is in the state of `status=...`.

    Exits with code 1 if it ended otherwise. Raises DEADLINE_EXCEEDED.
    """
    wanted, task_id = _wanted_state(expected), one_task(words)
    deadline = time.monotonic() + timeout_seconds
    with connect(home) as api:
        # Checked once, however short the timeout.
        first = task = _task(api, task_id)
    task_id = task["id"]
    following = (news["task"] for news in _followed(task_id, home, deadline) if "task" in news)
    for task in chain([first], following):
        if has_ended(task) or task["state"] == wanted or time.monotonic() >= deadline:
            break
    state = task["state"]
    if not (has_ended(task) or state == wanted):
        raise WeftError(Reason.DEADLINE_EXCEEDED, f"task {task_id} is {state} after {timeout_seconds:g} s")
    say(f"task/{task_id}: {state}\n")
    if state != (wanted or "completed"):
        note(_error(task) or f"it was to be {wanted or 'completed'}")
        raise typer.Exit(EXIT_FAILED)


def has_ended(task: Document) -> bool:
    """Whether a task is completed, failed or cancelled."""
    return task["state"] in _ENDS


def _wanted_state(expected: str | None) -> str:
    if expected is None:
        return ""
    what, _, state = expected.partition("=")
    if what.lower() != "status" or state.lower() not in ("pending", "running", *_ENDS):
        raise invalid_field("--for", "of a task: status=pending, running, completed, failed or cancelled")
    return state.lower()


def _followed(task_id: str, home: Path, deadline: float | None = None) -> Iterator[Document]:
    """Yields the task (`task`) at each change and chunks of its answer (`piece`) until its end or `deadline`.

    Continues across restarts of the mesh. Without a deadline, once the task has been found, retries during an outage
    for RETRY_LIMIT_SECONDS.
    """
    after, limit_seconds = 0, RETRY_LIMIT_SECONDS if deadline is None else math.inf
    breaks = Breaks(limit_seconds, _AWAY, began=deadline is not None, is_quiet=True)
    while True:
        try:
            for news in _news(task_id, home, after, deadline):
                breaks.none()
                yield news
                if "piece" in news:
                    after = news["piece"]["lastEvent"]
                elif has_ended(news["task"]):
                    return
        except WeftError as error:
            if deadline is not None and error.reason in _AWAY and time.monotonic() >= deadline:
                return  # The caller reports the timeout.
            breaks.note(error)
        time.sleep(RETRY_PAUSE_SECONDS)


def _news(task_id: str, home: Path, after: int = 0, deadline: float | None = None) -> Iterator[Document]:
    with connect(home, RETRY_LIMIT_SECONDS) as api:
        yield from filter(None, api.stream(f"{TASKS}/{task_id}/events", deadline, after=after))


def print_answer(words: Sequence[str], home: Path, *, follow: bool) -> None:
    """Prints a task's answer so far; `follow`: until its end.

    An answer that restarts after a lost attempt is noted on stderr. Exits with code 1 for a task that ended without an
    answer.
    """
    with connect(home) as api:
        task_id = full_id(api, TASK_IDS, one_task(words))
    task = _print_pieces(_followed(task_id, home) if follow else _news(task_id, home), follow=follow)
    if has_ended(task) and task["state"] != "completed":
        why = _error(task)
        note(f"task {task_id} {task['state']}" + (f": {why}" if why else ""))
        raise typer.Exit(EXIT_FAILED)
    if not has_ended(task):
        note(f"task {task_id} is {task['state']}; `weft logs task/{task_id} -f` continues with it")


def _print_pieces(watched: Iterator[Document], *, follow: bool) -> Document:
    """Prints the stored answer, or follows it to its end. Returns the last state of the task.

    Raises SERVICE_UNAVAILABLE if the mesh ends the watch before it sends the task.
    """
    first = next(watched, None)
    if first is None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the mesh ended the watch before it sent the task; try again")
    task: Document = first["task"]
    last, attempt, seen = task["lastEvent"], 0, 0
    while follow or seen < last:
        news = next(watched, None)
        if news is None:
            break
        if "task" in news:
            # Output of a lost attempt is not sent again, so its events must not be waited for.
            task, last = news["task"], min(last, news["task"]["lastEvent"])
            continue
        piece = news["piece"]
        if attempt not in (0, piece["attempt"]):
            say("\n")
            note(f"attempt {attempt} was lost; the answer starts again")
        attempt, seen = piece["attempt"], piece["lastEvent"]
        for event in piece.get("output", {}).get("events", ()):
            # The text of the first choice, or of a transcription.
            part = event.get("transcript") or event.get("delta") or {}
            text = "" if part.get("index", 0) else part.get("text", "")
            say_answer(text)
    say("\n" if attempt else "")
    return task
