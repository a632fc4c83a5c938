"""What one router knows of lanes: who is read ahead, who is offered, and who was refused. No I/O, no clock."""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from router_svc.durable.tasks.config import TaskLimits
from router_svc.durable.tasks.store_port import Lane, PendingTask
from router_svc.policy.task_retry import OfferAgain, after_refused_offer
from router_svc.policy.task_turns import LaneTurn, next_turns
from weft.kernel.errors import WeftError

GIVE_WAY_SHARE = 4
"""Where all lanes wait for slots, one in so many gives way at each look to those that have no place yet."""


@dataclass(slots=True)
class LaneState:
    """One lane. Times are monotonic."""

    lane: Lane
    fresh: deque[PendingTask] = field(default_factory=deque)
    """Read ahead, to be offered."""
    refused: deque[PendingTask] = field(default_factory=deque)
    """Those that were refused by themselves, until `refused_until`."""
    refused_until: float = 0.0
    offered: dict[str, PendingTask] = field(default_factory=dict)
    """Those that wait for a slot."""
    has_more: bool = True
    """Whether there may be some that are not read."""
    paused_until: float = 0.0
    """All of them were refused."""
    refusals: int = 0
    """Since the last claim."""
    words: str = ""
    """Why they were."""
    is_probed: bool = False
    """Whether all of them were refused, so that one alone is offered until it is granted a slot."""

    def ready(self, now: float) -> int:
        """How many may be offered now."""
        if self.paused_until > now:
            return 0
        return min(len(self.fresh), max(0, 1 - len(self.offered))) if self.is_probed else len(self.fresh)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is known of anybody in it."""
        return not (self.fresh or self.refused or self.offered or self.has_more)

    @property
    def known(self) -> int:
        """How many are read."""
        return len(self.fresh) + len(self.refused) + len(self.offered)


class TaskDispatcher:
    """The lanes of one router, in the order in which they take turns."""

    def __init__(self, limits: TaskLimits) -> None:
        self._limits = limits
        self._books: dict[Lane, LaneState] = {}
        self._last: Lane | None = None
        self._bytes = 0
        """Of all that are read and not claimed."""

    @property
    def is_full(self) -> bool:
        """Whether another lane has to wait for its turn."""
        return len(self._books) >= self._limits.max_lanes

    @property
    def has_place(self) -> bool:
        """Whether another lane can have its turn: there is room, or a lane in which nobody waits any more."""
        return not self.is_full or any(book.is_idle for book in self._books.values())

    def note(self, lane: Lane) -> bool:
        """Somebody waits in a lane. False: there is no place for another lane now."""
        book = self._books.get(lane)
        if book is None and self.is_full:
            return False
        if book is None:
            self._books[lane] = LaneState(lane)
        else:
            book.has_more = True
        return True

    def note_all(self) -> None:
        """More may wait in every lane."""
        for book in self._books.values():
            book.has_more = True

    def make_room(self, others: Sequence[Lane]) -> Sequence[PendingTask]:
        """Let others have their turn, if there are any for whom there is no place; the offers that are withdrawn.

        Lanes that are offered nothing give way, or else some of those that have had their places for longest.
        """
        unknown = [lane for lane in others if lane not in self._books]
        if len(self._books) + len(unknown) <= self._limits.max_lanes:
            return ()
        idle = [lane for lane, book in self._books.items() if not book.offered]
        oldest = list(self._books)[: max(1, self._limits.max_lanes // GIVE_WAY_SHARE)]
        return [task for lane in idle or oldest for task in self._drop(lane)]

    def try_all_again(self) -> None:
        """The mesh has changed: who was refused may be lucky now."""
        for book in self._books.values():
            book.paused_until = book.refused_until = 0.0
            book.refusals = 0

    def next_to_read(self, now: float) -> Sequence[LaneState]:
        """Lanes of which more should be read."""
        return [book for book in self._books.values() if self._wants_more(book, now)]

    def room_in(self, book: LaneState) -> tuple[int, int]:
        """How many tasks and bytes of a lane may be read; those that are known come first, and are read again."""
        left = self._limits.max_peeked_bytes - self._bytes
        again = sum(len(task.spec) for task in self._of(book))
        return self._limits.peeked_per_lane + book.known, max(1, left) + again

    def put(
        self, book: LaneState, tasks: Sequence[PendingTask], room: tuple[int, int], known_elsewhere: Container[str]
    ) -> None:
        """What was read of a lane with room for so much; nothing of it is taken twice."""
        have = {task.id for task in self._of(book)}
        unknown = [task for task in tasks if task.id not in have]
        new = [task for task in unknown if task.id not in known_elsewhere]
        limit, most_bytes = room
        size = sum(len(task.spec) for task in tasks)
        is_all = len(tasks) < limit and size + self._limits.max_spec_bytes <= most_bytes
        # Where a reading had room for more, or brought nothing new, there is nothing more until somebody says so. Who
        # is known elsewhere may just be given back, and is read once more.
        book.has_more = book.has_more or (bool(new) and not is_all) or len(new) < len(unknown)
        book.fresh.extend(new)
        self._bytes += sum(len(task.spec) for task in new)

    def take(self, now: float, free: int) -> Sequence[PendingTask]:
        """The tasks to offer now, at most so many; they count as offered."""
        for book in self._books.values():
            if book.refused and book.refused_until <= now:
                book.fresh.extendleft(reversed(book.refused))
                book.refused.clear()
        turns = [LaneTurn(lane, book.ready(now), len(book.offered)) for lane, book in self._books.items()]
        lanes = next_turns(turns, after=self._last, per_lane=self._limits.offers_per_lane, free=free)
        taken = []
        for lane in lanes:
            book = self._books[lane]
            task = book.fresh.popleft()
            book.offered[task.id] = task
            taken.append(task)
            self._last = lane
        return taken

    def claimed(self, task: PendingTask) -> None:
        """A slot was granted, and the task is claimed."""
        book = self._leave(task)
        if book is not None:
            book.refusals = 0
            book.is_probed = False
            book.paused_until = 0.0
            book.words = ""

    def gone(self, task: PendingTask) -> None:
        """It is not to be had: what else is read may not be up to date either."""
        book = self._leave(task)
        if book is not None:
            self._forget(book.fresh)
            book.has_more = True

    def returned(self, task: PendingTask) -> None:
        """Its offer came to nothing for no fault of anybody: it is the next again."""
        self._put_back(task)

    def refused(self, task: PendingTask, error: WeftError, now: float, *, is_unwritten: bool = False) -> None:
        """Its offer was refused; `is_unwritten`: by the database, which says nothing of the mesh."""
        book = self._put_back(task)
        if book is None:
            return
        book.words = error.message
        is_another_round = max(book.paused_until, book.refused_until) <= now
        # Those who were offered together are refused together, which is one refusal.
        book.refusals += is_another_round and not is_unwritten
        refusals = 1 if is_unwritten else book.refusals
        verdict = after_refused_offer(
            error.reason, error.message, refusals=refusals, retry_after_seconds=error.retry_after_seconds
        )
        if not isinstance(verdict, OfferAgain):
            return
        if verdict.whole_lane:
            book.is_probed = True
            book.paused_until = max(book.paused_until, now + verdict.pause_seconds)
            return
        book.fresh.popleft()
        book.refused.append(task)
        # Whoever comes later does not prolong the pause of those who wait already.
        if book.refused_until <= now:
            book.refused_until = now + verdict.pause_seconds

    def withdraw(self, task_id: str) -> None:
        """Somebody has ended a task that is read."""
        for book in self._books.values():
            for queue in (book.fresh, book.refused):
                found = next((task for task in queue if task.id == task_id), None)
                if found is not None:
                    queue.remove(found)
                    self._bytes -= len(found.spec)

    def waiting_reason(self, model: str, tenant: str) -> str:
        """What was said last to those of a tenant who ask for a model."""
        return next(
            (book.words for lane, book in self._books.items() if (lane.model, lane.tenant) == (model, tenant)), ""
        )

    def next_look_at(self, now: float) -> float | None:
        """When the next pause ends; None: there is none."""
        ends = [
            moment
            for book in self._books.values()
            for moment, anybody in (
                (book.paused_until, book.fresh or book.has_more),
                (book.refused_until, book.refused),
            )
            if anybody and moment > now
        ]
        return min(ends, default=None)

    def tidy(self) -> None:
        """Forget lanes in which nobody waits."""
        for lane in [lane for lane, book in self._books.items() if book.is_idle]:
            del self._books[lane]

    def _wants_more(self, book: LaneState, now: float) -> bool:
        if not book.has_more or book.fresh or book.paused_until > now:
            return False
        if len(book.refused) >= self._limits.peeked_per_lane:
            return False
        # However much others have read, each lane has one that it can offer. Where there is no room for any task
        # whatever its size, a reading that brings nothing new would not mean that there is nothing more.
        left = self._limits.max_peeked_bytes - self._bytes
        return left >= self._limits.max_spec_bytes or not book.known

    def _of(self, book: LaneState) -> Iterable[PendingTask]:
        return (*book.fresh, *book.refused, *book.offered.values())

    def _leave(self, task: PendingTask) -> LaneState | None:
        book = self._books.get(task.lane)
        if book is None or book.offered.pop(task.id, None) is None:
            return None
        self._bytes -= len(task.spec)
        return book

    def _put_back(self, task: PendingTask) -> LaneState | None:
        book = self._books.get(task.lane)
        if book is None or book.offered.pop(task.id, None) is None:
            return None
        book.fresh.appendleft(task)
        return book

    def _forget(self, queue: deque[PendingTask]) -> None:
        self._bytes -= sum(len(task.spec) for task in queue)
        queue.clear()

    def _drop(self, lane: Lane) -> Sequence[PendingTask]:
        """Forget a lane; those of it that are offered."""
        book = self._books.pop(lane)
        self._bytes -= sum(len(task.spec) for task in self._of(book))
        return tuple(book.offered.values())
