"""Decides which pending tasks a router offers to the scheduler, lane by lane. No I/O, no clock.

Each lane is read ahead and offers a few tasks; a refused offer pauses the task or the whole lane. Lanes take turns, so
that none starves another.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.task_records import Lane, PendingTask
from router_svc.policy.task_retry import OfferAgain, after_refused_offer
from weft.kernel.errors.error_tree import WeftError

DROPPED_LANE_SHARE = 4
"""If every lane waits for slots, one in this many lanes is evicted at each look to make room for others."""


def next_turns(left: dict[Lane, int], *, after: Lane | None, free: int) -> list[Lane]:
    """Return the lanes to offer a task of, in order, each at most `left` times.

    Each round takes one task per lane, starting behind `after`, the last served lane, until `free` places are used.
    """
    order = list(left)
    begin = order.index(after) + 1 if after in left else 0
    turns: list[Lane] = []
    while len(turns) < free and any(count > 0 for count in left.values()):
        for lane in (*order[begin:], *order[:begin]):
            if left[lane] > 0 and len(turns) < free:
                left[lane] -= 1
                turns.append(lane)
    return turns


@dataclass(slots=True)
class LaneState:
    """The state of a lane. Times are monotonic seconds."""

    lane: Lane
    fresh: deque[PendingTask] = field(default_factory=deque)
    """Tasks that were read ahead and may be offered."""
    refused: deque[PendingTask] = field(default_factory=deque)
    """Tasks with refused offers; they pause until `refused_until`."""
    refused_until: float = 0.0
    offered: dict[str, PendingTask] = field(default_factory=dict)
    """Tasks that wait for a slot in the scheduler, by id."""
    has_more: bool = True
    """Whether the store may have unread tasks of the lane."""
    paused_until: float = 0.0
    """End of the pause after the whole lane was refused."""
    refusals: int = 0
    """Refused offers since the last claim."""
    refusal_message: str = ""
    is_probed: bool = False
    """Whether the whole lane was refused, so that only one task is offered until it is granted a slot."""

    def ready(self, now: float) -> int:
        """Returns how many tasks may be offered now."""
        if self.paused_until > now:
            return 0
        return min(len(self.fresh), max(0, 1 - len(self.offered))) if self.is_probed else len(self.fresh)

    @property
    def is_idle(self) -> bool:
        """Whether no task of the lane is known."""
        return not (self.fresh or self.refused or self.offered or self.has_more)

    @property
    def known(self) -> int:
        """The number of tasks in memory."""
        return len(self.fresh) + len(self.refused) + len(self.offered)


class TaskDispatcher:
    """The lanes of a router, offered to the scheduler in round-robin order."""

    def __init__(self, limits: TaskLimits) -> None:
        self._limits = limits
        self._lanes: dict[Lane, LaneState] = {}
        self._last: Lane | None = None
        self._bytes = 0
        """Bytes of all tasks in memory that are not claimed."""

    @property
    def is_full(self) -> bool:
        """Whether `max_lanes` lanes are held."""
        return len(self._lanes) >= self._limits.max_lanes

    @property
    def has_room(self) -> bool:
        """Whether another lane can be added: there is room, or an idle lane."""
        return not self.is_full or any(state.is_idle for state in self._lanes.values())

    def note(self, lane: Lane) -> bool:
        """Records that a task is pending in a lane. False: there is no room for another lane."""
        state = self._lanes.get(lane)
        if state is None and self.is_full:
            return False
        if state is None:
            self._lanes[lane] = LaneState(lane)
        else:
            state.has_more = True
        return True

    def make_room(self, others: Sequence[Lane]) -> Sequence[PendingTask]:
        """Evicts lanes if there is no room for the others; returns the offers to withdraw.

        Evicts lanes without an offer, else some of those that were added first.
        """
        unknown = [lane for lane in others if lane not in self._lanes]
        if len(self._lanes) + len(unknown) <= self._limits.max_lanes:
            return ()
        idle = [lane for lane, state in self._lanes.items() if not state.offered]
        oldest = list(self._lanes)[: max(1, self._limits.max_lanes // DROPPED_LANE_SHARE)]
        return [task for lane in idle or oldest for task in self._drop(lane)]

    def try_all_again(self) -> None:
        """Ends all pauses because the mesh has changed."""
        for state in self._lanes.values():
            state.paused_until = state.refused_until = 0.0
            state.refusals = 0

    def next_to_read(self, now: float) -> Sequence[LaneState]:
        """Returns the lanes to read more tasks of."""
        return [state for state in self._lanes.values() if self._wants_more(state, now)]

    def room_in(self, state: LaneState) -> tuple[int, int]:
        """Returns how many tasks and bytes of a lane to read, including known tasks, which are read again first."""
        left = self._limits.max_peeked_bytes - self._bytes
        again = sum(len(task.spec) for task in self._of(state))
        return self._limits.peeked_per_lane + state.known, max(1, left) + again

    def put(
        self, state: LaneState, tasks: Sequence[PendingTask], room: tuple[int, int], known_elsewhere: Container[str]
    ) -> None:
        """Adds tasks that were read from a lane with limit `room`; known ones are skipped."""
        have = {task.id for task in self._of(state)}
        unknown = [task for task in tasks if task.id not in have]
        new = [task for task in unknown if task.id not in known_elsewhere]
        limit, most_bytes = room
        size = sum(len(task.spec) for task in tasks)
        is_all = len(tasks) < limit and size + self._limits.max_spec_bytes <= most_bytes
        # A read that had room to spare or found no new task has reached the end of the lane, until an event
        # reports more. A task that is known elsewhere may be returning right now, and is read again.
        state.has_more = state.has_more or (bool(new) and not is_all) or len(new) < len(unknown)
        state.fresh.extend(new)
        self._bytes += sum(len(task.spec) for task in new)

    def take(self, now: float, free: int) -> Sequence[PendingTask]:
        """Returns at most `free` tasks to offer now; they count as offered."""
        for state in self._lanes.values():
            if state.refused and state.refused_until <= now:
                state.fresh.extendleft(reversed(state.refused))
                state.refused.clear()
        most = self._limits.offers_per_lane
        left = {lane: min(state.ready(now), most - len(state.offered)) for lane, state in self._lanes.items()}
        taken = []
        for lane in next_turns(left, after=self._last, free=free):
            state = self._lanes[lane]
            task = state.fresh.popleft()
            state.offered[task.id] = task
            taken.append(task)
            self._last = lane
        return taken

    def claimed(self, task: PendingTask) -> None:
        """Records that a task got its slot and is claimed."""
        state = self._leave(task)
        if state is not None:
            state.refusals = 0
            state.is_probed = False
            state.paused_until = 0.0
            state.refusal_message = ""

    def gone(self, task: PendingTask) -> None:
        """Records that a task is no longer pending; the rest of the lane may be stale too and is read again."""
        state = self._leave(task)
        if state is not None:
            self._forget(state.fresh)
            state.has_more = True

    def returned(self, task: PendingTask) -> None:
        """Records that an offer was withdrawn without a fault; the task is its lane's next again."""
        self._put_back(task)

    def refused(self, task: PendingTask, error: WeftError, now: float, *, is_unwritten: bool = False) -> None:
        """Records a refused offer; `is_unwritten`: the database refused the claim, not the mesh."""
        state = self._put_back(task)
        if state is None:
            return
        state.refusal_message = error.log_message
        is_another_round = max(state.paused_until, state.refused_until) <= now
        # Tasks that were offered together are refused together, which counts once.
        state.refusals += is_another_round and not is_unwritten
        verdict = after_refused_offer(error, 1 if is_unwritten else state.refusals)
        if not isinstance(verdict, OfferAgain):
            return
        if verdict.whole_lane:
            state.is_probed = True
            state.paused_until = max(state.paused_until, now + verdict.pause_seconds)
            return
        state.fresh.popleft()
        state.refused.append(task)
        # A later refusal does not extend the pause of earlier ones.
        if state.refused_until <= now:
            state.refused_until = now + verdict.pause_seconds

    def withdraw(self, task_id: str) -> None:
        """Removes a task that was ended elsewhere."""
        for state in self._lanes.values():
            for queue in (state.fresh, state.refused):
                found = next((task for task in queue if task.id == task_id), None)
                if found is not None:
                    queue.remove(found)
                    self._bytes -= len(found.spec)

    @property
    def refusals(self) -> Mapping[Lane, str]:
        """The messages of the last refused offers, of lanes without a claim since."""
        return {lane: state.refusal_message for lane, state in self._lanes.items() if state.refusal_message}

    def waiting_reason(self, model: str, tenant: str) -> str:
        """Returns the message of the last refusal of a tenant's tasks for a model."""
        return next(
            (
                state.refusal_message
                for lane, state in self._lanes.items()
                if (lane.model, lane.tenant) == (model, tenant)
            ),
            "",
        )

    def next_look_at(self, now: float) -> float | None:
        """Returns when the next pause ends; None: there is none."""
        ends = [
            moment
            for state in self._lanes.values()
            for moment, has_tasks in (
                (state.paused_until, state.fresh or state.has_more),
                (state.refused_until, state.refused),
            )
            if has_tasks and moment > now
        ]
        return min(ends, default=None)

    def tidy(self) -> None:
        """Drops idle lanes."""
        for lane in [lane for lane, state in self._lanes.items() if state.is_idle]:
            del self._lanes[lane]

    def _wants_more(self, state: LaneState, now: float) -> bool:
        if not state.has_more or state.fresh or state.paused_until > now:
            return False
        if len(state.refused) >= self._limits.peeked_per_lane:
            return False
        # Each lane may hold one task regardless of the others. With less room than the largest task, a read without a
        # new task would not mean that the lane has no more.
        left = self._limits.max_peeked_bytes - self._bytes
        return left >= self._limits.max_spec_bytes or not state.known

    def _of(self, state: LaneState) -> Iterable[PendingTask]:
        return (*state.fresh, *state.refused, *state.offered.values())

    def _leave(self, task: PendingTask) -> LaneState | None:
        state = self._lanes.get(task.lane)
        if state is None or state.offered.pop(task.id, None) is None:
            return None
        self._bytes -= len(task.spec)
        return state

    def _put_back(self, task: PendingTask) -> LaneState | None:
        state = self._lanes.get(task.lane)
        if state is None or state.offered.pop(task.id, None) is None:
            return None
        state.fresh.appendleft(task)
        return state

    def _forget(self, queue: deque[PendingTask]) -> None:
        self._bytes -= sum(len(task.spec) for task in queue)
        queue.clear()

    def _drop(self, lane: Lane) -> Sequence[PendingTask]:
        """Returns the lane's offered tasks."""
        state = self._lanes.pop(lane)
        self._bytes -= sum(len(task.spec) for task in self._of(state))
        return tuple(state.offered.values())
