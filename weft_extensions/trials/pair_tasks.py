"""Which requests of a tenant a trial asks its candidate again, and the tasks that do so."""

from hashlib import sha256
from typing import Any

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.trial_pb2 import TrialManifest
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.dispatch.captured import may_capture
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.request_receipt import RequestContext
from weft.durable.durable_call import task_spec
from weft.durable.ended_requests import EndedRequest, ObserverParts, RequestObserver
from weft.durable.tasks import TaskClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.trials")

TRIAL_KEY, REQUEST_KEY = "weft-trial", "weft-request"
"""Metadata of a pair's task: the trial's name, and the id of the original request."""
CALLER = "service:trials"
"""Caller of pairs, so that they do not count as requests of the caller's key."""
COUNT_SECONDS = 60.0
"""Interval in which the pairs of a complete trial are counted: deleted ones make room."""
_HASH_RANGE = 2**64


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


class PairSubmitter(RequestObserver):
    """Submits the pairs of ended requests: one that the task store refuses is dropped, and logged."""

    def __init__(self, parts: ObserverParts) -> None:
        self._parts = parts
        self._complete: dict[str, tuple[TrialManifest, float]] = {}
        """Trials that had all their pairs when they were counted, and until when they are not counted again."""

    @override
    def wants(self, view: FleetView, context: RequestContext, payload: GenerationPayload) -> bool:
        return self._parts.tasks() is not None and bool(trials_of(view, context, payload))

    @override
    async def ended(self, request: EndedRequest) -> None:
        # Tools that a runner ran would be run once more, with their effects.
        if request.receipt.outcome != receipt_pb2.OUTCOME_COMPLETED or request.receipt.tool_run_count:
            return
        # Decided again: the trial may have been deleted, or its tenant's `capture`, during a long answer.
        view, tasks = self._parts.view(), self._parts.tasks()
        self._complete = {name: each for name, each in self._complete.items() if name in view.trials}
        for trial in trials_of(view, request.context, request.payload):
            try:
                if tasks is not None and not await self._is_complete(tasks, trial):
                    pair = pair_of(trial, request.context, request.payload, request.answer)
                    await tasks.submit(trial.tenant, pair, caller=CALLER)
            except WeftError as error:
                log.warning("trial pair dropped", trial=trial.name, why=error.message)

    async def _is_complete(self, tasks: TaskClient, trial: TrialManifest) -> bool:
        known, until = self._complete.get(trial.name, (None, 0.0))
        if known == trial and self._parts.clock.monotonic() < until:
            return True
        wanted = pb.ListTasksRequest(origin_kind=origin_kind_of(trial.name), page_size=trial.max_pairs)
        is_complete = len((await tasks.list_page(trial.tenant, wanted)).tasks) >= trial.max_pairs
        if is_complete:
            self._complete[trial.name] = (trial, self._parts.clock.monotonic() + COUNT_SECONDS)
        return is_complete


def observer(parts: ObserverParts) -> PairSubmitter:
    """Returns the observer of a process."""
    return PairSubmitter(parts)


def _is_in_share(trial: TrialManifest, request_id: str) -> bool:
    return _hash(f"{trial.name}\0{request_id}") < trial.share_percent / 100 * _HASH_RANGE


def _hash(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big")
