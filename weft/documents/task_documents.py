"""Durable tasks as documents: what commands print with -o json."""

from datetime import datetime
from typing import Literal

from weft.documents.document_base import DocumentPart
from weft.documents.request_documents import ReceiptDocument

TaskStateWord = Literal["pending", "running", "completed", "failed", "cancelled", "unknown"]


class TaskErrorDocument(DocumentPart):
    """Why something came to nothing."""

    reason: str
    """From the one list of reasons."""
    message: str
    """The same in words."""


class TaskAttemptDocument(DocumentPart):
    """One time that a task was begun."""

    attempt: int
    """Counted from 1."""
    owner: str
    """The router that claimed it."""
    claimed_at: datetime
    """When it was claimed."""
    ended_at: datetime | None = None
    """When it ended; absent: it runs."""
    error: TaskErrorDocument | None = None
    """Why it came to nothing; absent while it runs, and for the one that completed."""
    receipt: ReceiptDocument | None = None
    """What happened, as far as it is known."""


class TaskDocument(DocumentPart):
    """A request that outlives its caller."""

    kind: Literal["task"]
    """What it is."""
    id: str
    """Its id, which is also the request id of every attempt."""
    tenant: str
    """Whose it is."""
    state: TaskStateWord
    """Where it is in its life."""
    model: str
    """What was asked for: a model, a pool, "route/" and a route, or "agent/" and an agent."""
    batch: str | None = None
    """The batch that it is a line of."""
    line: int | None = None
    """Which line, counted from 0."""
    created_at: datetime
    """When it was acknowledged."""
    started_at: datetime | None = None
    """When it was claimed last."""
    ended_at: datetime | None = None
    """When it reached its end."""
    expires_at: datetime | None = None
    """When it fails unless it has been begun by then."""
    attempt: int
    """How often it was begun."""
    max_attempts: int
    """How many attempts may come to nothing."""
    error: TaskErrorDocument | None = None
    """Why it failed."""
    waiting_for: str | None = None
    """What is known of why it waits."""
    origin_kind: str | None = None
    """The API in whose words it was submitted."""
    owner: str | None = None
    """The router that has claimed it, while it runs."""
    last_event: int = 0
    """Number of the last event that is kept of its current attempt; 0: none."""
    attempts: tuple[TaskAttemptDocument, ...] = ()
    """Every attempt in order, where one task was asked for."""

    @property
    def is_over(self) -> bool:
        """Whether it is at its end."""
        return self.state in {"completed", "failed", "cancelled"}


class TaskList(DocumentPart):
    """Tasks, the newest first."""

    kind: Literal["TaskList"]
    """What it is."""
    items: tuple[TaskDocument, ...]
    """The tasks, without their attempts."""
    notice: str | None = None
    """What whoever looks after the mesh must know of whoever keeps the tasks."""
