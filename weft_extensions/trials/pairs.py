"""The pairs of a trial, as its durable tasks have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from google.protobuf.message import DecodeError

from gateway.answers.answer_builder import CalledTool, add_call
from gateway.tasks.task_handlers import outputs_of
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.api.common.v1.chat_pb2 import ChatPayload
from weft.api.common.v1.completion_pb2 import CompletionPayload
from weft.api.gateway.v1 import trial_report_pb2 as pb
from weft.api.registry.v1.trial_pb2 import Trial, Verdict
from weft.api.router.v1 import task_pb2
from weft.api.router.v1.task_service_pb2 import GetTaskResponse, ListTasksRequest
from weft.dispatch.captured import answer_text, prompt_text
from weft.dispatch.frames import GenerationPayload
from weft.durable.tasks import MAX_LISTED, TaskClient, failure_of, is_terminal, payload_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.value_check import ValueCheck
from weft.kernel.text.json_objects import plain_object
from weft.kernel.time.timestamps import optional_seconds, seconds_of
from weft_extensions.trials.comparison import Answer, ToolCall, check_pair
from weft_extensions.trials.pair_tasks import REQUEST_KEY, is_candidate_first, origin_kind_of

MAX_CHECKS = 10_000
"""Maximum number of pairs whose checks are kept in memory; they never change."""
MAX_CHECK_CPU_SECONDS = 0.1
"""Maximum processor time of one check of an answer's schema, which blocks the event loop."""

Events = Sequence[event_pb2.InferenceEvent]


@dataclass(frozen=True, slots=True)
class Pair:
    """An answered pair."""

    details: GetTaskResponse
    payload: GenerationPayload
    candidate: Events
    against: Events


class TrialPairs:
    """Reads the pairs of trials from the task store."""

    def __init__(self, tasks: TaskClient) -> None:
        self._tasks = tasks
        self._checks: dict[str, pb.TrialChecks] = {}
        """By the id of the task, oldest first."""

    async def report(self, trial: Trial) -> list[pb.TrialPair]:
        """Returns the pairs of a trial, newest first, the answered ones with their checks."""
        manifest = trial.manifest
        wanted = ListTasksRequest(origin_kind=origin_kind_of(manifest.name), page_size=MAX_LISTED)
        page = await self._tasks.list_page(manifest.tenant, wanted)
        return [await self._shown(trial, task) for task in page.tasks]

    async def pair(self, trial: Trial, task_id: str) -> Pair:
        """Returns an answered pair. Raises NOT_FOUND, and RESOURCE_IN_USE for a pair without a second answer."""
        details = await self._tasks.details(trial.manifest.tenant, task_id)
        payload: Any = payload_of(details.spec)
        original = _events_in(details.spec.origin)
        # Callers of the task service choose the kinds and origins of their tasks.
        is_pair = details.task.origin_kind == origin_kind_of(trial.manifest.name) and original is not None
        if not is_pair or not isinstance(payload, (ChatPayload, CompletionPayload)):
            raise WeftError(Reason.NOT_FOUND, f"the trial {trial.manifest.name} has no pair {task_id[:64]}")
        if details.task.state != task_pb2.TASK_STATE_COMPLETED:
            word = "failed" if is_terminal(details.task) else "is not complete yet"
            raise WeftError(Reason.RESOURCE_IN_USE, f"the second answer of pair {task_id} {word}")
        outputs = await outputs_of(self._tasks, details.task)
        return Pair(details, payload, list(chain.from_iterable(each.events for each in outputs)), original or ())

    async def _shown(self, trial: Trial, task: task_pb2.Task) -> pb.TrialPair:
        shown = pb.TrialPair(
            task=task.id,
            request_id=task.metadata.get(REQUEST_KEY, ""),
            state="failed" if is_terminal(task) else "waiting",
            create_time=task.create_time,
            verdict=trial.verdicts.get(task.id, Verdict.VERDICT_UNSPECIFIED),
        )
        if task.state == task_pb2.TASK_STATE_COMPLETED:
            try:
                shown.checks.CopyFrom(await self._checked(trial, task.id))
                shown.state = "answered"
            except WeftError as error:
                # Its answer was deleted meanwhile, or cannot be read.
                shown.error = error.message
        elif (failure := failure_of(task)) is not None:
            shown.error = failure.message
        return shown

    async def _checked(self, trial: Trial, task_id: str) -> pb.TrialChecks:
        if task_id not in self._checks:
            pair = await self.pair(trial, task_id)
            schema = _schema_of(pair.details.spec)
            is_valid = None if schema is None else partial(matches, schema)
            if len(self._checks) >= MAX_CHECKS:
                self._checks.pop(next(iter(self._checks)))
            self._checks[task_id] = check_pair(answer_of(pair.candidate), answer_of(pair.against), is_valid)
        return self._checks[task_id]


def shown_pair(trial: Trial, pair: Pair) -> pb.TrialPairDetails:
    """Returns the prompt and both answers of a pair; the model that wrote A is named only after a verdict."""
    task, manifest = pair.details.task, trial.manifest
    sides = [(pair.candidate, manifest.candidate), (pair.against, manifest.against)]
    if not is_candidate_first(manifest.name, task.metadata.get(REQUEST_KEY, "")):
        sides.reverse()
    verdict = trial.verdicts.get(task.id, Verdict.VERDICT_UNSPECIFIED)
    return pb.TrialPairDetails(
        task=task.id,
        prompt=prompt_text(pair.payload),
        a=pb.TrialAnswer(text=answer_text(sides[0][0])),
        b=pb.TrialAnswer(text=answer_text(sides[1][0])),
        verdict=verdict,
        a_by=sides[0][1] if verdict else "",
    )


def _events_in(origin: bytes) -> Events | None:
    """Returns the original answer; None: it is none."""
    try:
        return task_pb2.TaskOutput.FromString(origin).events
    except DecodeError:
        return None


def answer_of(events: Events) -> Answer:
    """Returns the text, the tool calls, the token count and the times of an answer, from its events."""
    texts: list[str] = []
    calls: dict[int, CalledTool] = {}
    receipt = receipt_pb2.Receipt()
    for event in events:
        if event.HasField("delta"):
            texts.append(event.delta.text)
            for piece in event.delta.tool_calls:
                add_call(calls, piece, "call")
        elif event.HasField("finished"):
            receipt = event.finished.receipt
    first = optional_seconds(receipt, "time_to_first_token")
    waits = seconds_of(receipt.queue_wait) + seconds_of(receipt.load_wait)
    return Answer(
        text="".join(texts),
        tool_calls=tuple(ToolCall(call.name, call.arguments) for call in calls.values()),
        tokens=receipt.usage.completion_tokens,
        first_token_seconds=None if first is None else max(0.0, first - waits),
        tokens_per_second=receipt.tokens_per_second if receipt.HasField("tokens_per_second") else None,
    )


def _schema_of(spec: task_pb2.TaskSpec) -> dict[str, Any] | None:
    """Returns the schema that a request has for its answer; None: it has none."""
    wanted = spec.chat.response_format
    match wanted.WhichOneof("kind"):
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            return plain_object(wanted.json_schema.schema)
    return None


def matches(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value matches a schema. Raises UncheckedError if it cannot be checked."""
    return not ValueCheck(schema, max_cpu_seconds=MAX_CHECK_CPU_SECONDS).problem(value)
