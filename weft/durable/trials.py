"""Which requests of a tenant a trial asks its candidate again, and the tasks that do so."""

import asyncio
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from typing_extensions import override

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.registry.v1.trial_pb2 import TrialManifest
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.dispatch.captured import may_capture
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_receipt import RequestContext
from weft.dispatch.run_observer import ObservedRun, RunObserver
from weft.durable.durable_call import task_spec
from weft.durable.tasks import TaskClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.trials")

MAX_PAIR_BYTES = 1_048_576
"""Maximum bytes of the payload and the answer of a request; larger ones are skipped."""
MAX_WAITING = 16
"""Maximum pairs that wait to be submitted, at most 16 MiB. Further ones are dropped."""
TRIAL_KEY, REQUEST_KEY = "weft-trial", "weft-request"
"""Metadata of a pair's task: the trial's name, and the id of the original request."""
CALLER = "service:trials"
"""Caller of pairs, so that they do not count as requests of the caller's key."""
COUNT_SECONDS = 60.0
"""Interval in which the pairs of a complete trial are counted: deleted ones make room."""
STOP_SECONDS = 1.0
_HASH_RANGE = 2**64
_NOT_STORED = frozenset({"queued", "loading", "progress", "work_progress"})


def origin_kind_of(trial: str) -> str:
    """Returns the `TaskSpec.origin_kind` of a trial's pairs."""
    return f"trial:{trial}"


def is_candidate_first(trial: str, request_id: str) -> bool:
    """Whether the candidate's answer of a pair is shown as A; always the same, and true for half the requests."""
    return _hash(f"{trial}\0{request_id}\0order") < _HASH_RANGE // 2


def trials_of(view: FleetView, context: RequestContext, payload: Any) -> list[TrialManifest]:
    """Returns the trials that ask their candidate the same, if the request succeeds. Pure.

    The same request is in the same trials, and a larger share has all requests of a smaller one.
    """
    found = [each.manifest for each in view.trials.values() if each.manifest.tenant == context.tenant]
    found = [each for each in found if each.against == context.model]
    # An answer of a trial is never the original of another pair.
    if not found or TRIAL_KEY in context.metadata or not may_capture(view, context, payload):
        return []
    if payload.choice_count > 1 or len(getattr(payload, "prompts", ())) > 1:
        return []
    return [each for each in found if _is_in_share(each, context.request_id)]


def pair_of(
    trial: TrialManifest, context: RequestContext, payload: GenerationPayload, answer: task_pb2.TaskOutput
) -> pb.SubmitTaskRequest:
    """Returns the task that asks the candidate what `context` asked, and keeps the original answer."""
    spec = task_spec(
        context, payload, origin=answer.SerializeToString(deterministic=True), origin_kind=origin_kind_of(trial.name)
    )
    spec.model, spec.asked_model, spec.traceparent = trial.candidate, "", ""
    # Without a priority it runs in idle capacity and the share of durable tasks.
    spec.options.priority = 0  # type: ignore[assignment]  # same numbers
    spec.metadata.clear()
    spec.metadata.update({TRIAL_KEY: trial.name, REQUEST_KEY: context.request_id})
    key = sha256(f"{trial.name}\0{context.request_id}".encode()).hexdigest()
    return pb.SubmitTaskRequest(spec=spec, idempotency_key=f"trial-{key}")


class SampledRequest(ObservedRun):
    """A request that a trial may ask again, with its answer as far as it was sent."""

    stores_text = False

    def __init__(
        self, context: RequestContext, payload: GenerationPayload, submit: Callable[["SampledRequest"], None]
    ) -> None:
        """`submit` gets it once it has succeeded."""
        self.context = context
        self.payload = payload
        self.answer = task_pb2.TaskOutput()
        self._bytes_left = MAX_PAIR_BYTES
        self._submit = submit

    @override
    def add(self, frame: Frame) -> None:
        kept = [event for event in frame if event.WhichOneof("event") not in _NOT_STORED]
        self._bytes_left -= sum(map(event_pb2.InferenceEvent.ByteSize, kept))
        if self._bytes_left >= 0:
            self.answer.events.extend(kept)

    @override
    def end(self, receipt: receipt_pb2.Receipt) -> None:
        # Tools that a runner ran would be run once more, with their effects.
        has_succeeded = receipt.outcome == receipt_pb2.OUTCOME_COMPLETED and not receipt.tool_run_count
        # The payload of a task gets its images after the start of its run.
        if has_succeeded and self.payload.ByteSize() <= self._bytes_left:
            self._submit(self)


class TrialSender(RunObserver):
    """Submits pairs in the background, one after the other: one that the task store refuses is dropped, and logged."""

    def __init__(self, tasks: Callable[[], TaskClient | None], view: Callable[[], FleetView], clock: Clock) -> None:
        """`tasks` returns the task store, None while there is none."""
        self._tasks = tasks
        self._view = view
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._complete: dict[str, tuple[TrialManifest, float]] = {}
        """Trials that had all their pairs when they were counted, and until when they are not counted again."""

    @override
    def observe(self, view: FleetView, context: RequestContext, payload: Any) -> SampledRequest | None:
        is_wanted = self._tasks() is not None and trials_of(view, context, payload)
        return SampledRequest(context, payload, self.submit) if is_wanted else None

    def submit(self, sampled: SampledRequest) -> None:
        """Submits the pairs of a request in the background. Returns immediately."""
        if len(self._waiting) >= MAX_WAITING:
            log.warning("trial pair dropped", why=f"{MAX_WAITING} wait to be submitted")
            return
        task = start_task(self._submit_all(sampled), name="trial pair")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def stop(self) -> None:
        """Waits a moment for those that are being submitted, and drops the rest. Safe to call twice."""
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=STOP_SECONDS)
            await stop_tasks(list(self._waiting))

    async def _submit_all(self, sampled: SampledRequest) -> None:
        async with self._turn:
            # Decided again: the trial may have been deleted, or its tenant's `capture`, during a long answer.
            view, tasks = self._view(), self._tasks()
            self._complete = {name: each for name, each in self._complete.items() if name in view.trials}
            for trial in trials_of(view, sampled.context, sampled.payload):
                try:
                    if tasks is not None and not await self._is_complete(tasks, trial):
                        pair = pair_of(trial, sampled.context, sampled.payload, sampled.answer)
                        await tasks.submit(trial.tenant, pair, caller=CALLER)
                except WeftError as error:
                    log.warning("trial pair dropped", trial=trial.name, why=error.message)

    async def _is_complete(self, tasks: TaskClient, trial: TrialManifest) -> bool:
        known, until = self._complete.get(trial.name, (None, 0.0))
        if known == trial and self._clock.monotonic() < until:
            return True
        wanted = pb.ListTasksRequest(origin_kind=origin_kind_of(trial.name), page_size=trial.max_pairs)
        is_complete = len((await tasks.list_page(trial.tenant, wanted)).tasks) >= trial.max_pairs
        if is_complete:
            self._complete[trial.name] = (trial, self._clock.monotonic() + COUNT_SECONDS)
        return is_complete


def _is_in_share(trial: TrialManifest, request_id: str) -> bool:
    return _hash(f"{trial.name}\0{request_id}") < trial.share_percent / 100 * _HASH_RANGE


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")
