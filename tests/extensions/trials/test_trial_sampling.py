"""Which requests a trial asks its candidate again, and what their tasks have."""

from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, receipt_pb2
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.api.registry.v1.trial_pb2 import Trial, TrialManifest
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.dispatch.fleet import FleetView
from weft.dispatch.request_receipt import RequestContext
from weft.durable.ended_requests import EndedRequests, ObserverParts
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CacheMode, Handling, Operation, Priority
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_extensions.trials.pair_tasks import COUNT_SECONDS, TRIAL_KEY, is_candidate_first, observer, trials_of
from weft_testing.fake_clock import FakeClock

TRIAL = TrialManifest(
    name="t", candidate="new", against="old", tenant="acme", share_percent=100, max_pairs=2, alias="chat"
)
CONTEXT = RequestContext(
    request_id="r1",
    tenant="acme",
    model="old",
    operation=Operation.CHAT,
    traceparent=new_traceparent(),
    asked_model="chat",
    priority=Priority.HIGH,
    allow_remote=True,
    metadata={"own": "value"},
)
CHAT = chat_pb2.ChatPayload(
    messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="Hi")])]
)
COMPLETED = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
ANSWER = [
    event_pb2.InferenceEvent(queued=event_pb2.Queued()),
    event_pb2.InferenceEvent(delta=event_pb2.Delta(text="Hello")),
    event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=COMPLETED)),
]


def view_of(*trials: TrialManifest, capture: bool = True) -> FleetView:
    tenants = {"acme": Tenant(manifest=TenantManifest(name="acme", capture=capture))}
    return FleetView(revision=1, tenants=tenants, trials={each.name: Trial(manifest=each) for each in trials})


def changed(**fields: Any) -> TrialManifest:
    manifest = TrialManifest()
    manifest.CopyFrom(TRIAL)
    manifest.MergeFrom(TrialManifest(**fields))
    return manifest


class Store:
    """A task store that keeps what is submitted."""

    def __init__(self, error: WeftError | None = None) -> None:
        self.submitted: list[pb.SubmitTaskRequest] = []
        self.error = error
        self.listings = 0

    async def submit(self, tenant: str, request: pb.SubmitTaskRequest, *, caller: str) -> None:
        assert (tenant, caller) == ("acme", "service:trials")
        if self.error is not None:
            raise self.error
        self.submitted.append(request)

    async def list_page(self, _tenant: str, request: pb.ListTasksRequest) -> pb.ListTasksResponse:
        self.listings += 1
        own = [each for each in self.submitted if each.spec.origin_kind == request.origin_kind]
        return pb.ListTasksResponse(tasks=[task_pb2.Task()] * min(len(own), request.page_size))


class Stage:
    """A sender over a store, with the newest view."""

    def __init__(self, *trials: TrialManifest, store: Store | None = None) -> None:
        self.store = store or Store()
        self.view = view_of(*(trials or (TRIAL,)))
        self.clock = FakeClock()
        parts = ObserverParts(tasks=lambda: self.store, view=lambda: self.view, clock=self.clock)  # type: ignore[arg-type,return-value]
        self.ended = EndedRequests("trials", observer(parts))

    async def answered(
        self,
        context: RequestContext = CONTEXT,
        payload: Any = CHAT,
        receipt: receipt_pb2.Receipt = COMPLETED,
    ) -> None:
        sampled = self.ended.observe(self.view, context, payload)
        if sampled is not None:
            sampled.add(ANSWER)
            sampled.end(receipt)
        await self.ended.stop()


@pytest.mark.parametrize(
    ("context", "payload", "view"),
    [
        pytest.param(replace(CONTEXT, tenant="other"), CHAT, view_of(TRIAL), id="another tenant"),
        pytest.param(replace(CONTEXT, model="older"), CHAT, view_of(TRIAL), id="another model"),
        pytest.param(CONTEXT, CHAT, view_of(TRIAL, capture=False), id="the tenant has no capture"),
        pytest.param(
            replace(CONTEXT, handling=Handling(cache_mode=CacheMode.NONE)), CHAT, view_of(TRIAL), id="X-Cache-Mode none"
        ),
        pytest.param(replace(CONTEXT, metadata={TRIAL_KEY: "u"}), CHAT, view_of(TRIAL), id="an answer of a trial"),
        pytest.param(CONTEXT, chat_pb2.ChatPayload(choice_count=2), view_of(TRIAL), id="two choices"),
        pytest.param(
            CONTEXT,
            completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text=text) for text in "ab"]),
            view_of(TRIAL),
            id="two prompts",
        ),
        pytest.param(CONTEXT, CHAT, view_of(), id="no trial"),
    ],
)
def test_only_single_answers_of_the_trial_s_model_to_its_captured_tenant_are_asked_again(
    context: RequestContext, payload: Any, view: FleetView
) -> None:
    assert trials_of(view_of(TRIAL), CONTEXT, CHAT) == [TRIAL]
    assert trials_of(view, context, payload) == []


def test_share_is_met_and_a_larger_share_has_the_requests_of_a_smaller_one() -> None:
    contexts = [replace(CONTEXT, request_id=f"r{number}") for number in range(2_000)]

    def sampled(percent: float) -> set[str]:
        view = view_of(changed(share_percent=percent))
        return {each.request_id for each in contexts if trials_of(view, each, CHAT)}

    few, more = sampled(10), sampled(40)
    assert few < more
    assert 150 < len(few) < 250
    assert 720 < len(more) < 880


def test_candidate_is_shown_first_in_half_of_the_pairs() -> None:
    first = [is_candidate_first("t", f"r{number}") for number in range(2_000)]
    assert 900 < sum(first) < 1_100


async def test_pair_asks_the_candidate_the_same_and_keeps_the_original_answer() -> None:
    stage = Stage()
    await stage.answered()
    [request] = stage.store.submitted
    spec = request.spec
    assert (spec.model, spec.asked_model, spec.traceparent) == ("new", "", "")
    assert spec.chat == CHAT
    assert spec.origin_kind == "trial:t"
    assert dict(spec.metadata) == {"weft-trial": "t", "weft-request": "r1"}
    assert (spec.options.allow_remote, spec.options.priority) == (True, 0)
    kept = task_pb2.TaskOutput.FromString(spec.origin).events
    assert [event.WhichOneof("event") for event in kept] == ["delta", "finished"]
    again = Stage()
    await again.answered()
    assert again.store.submitted[0].idempotency_key == request.idempotency_key


@pytest.mark.parametrize(
    "receipt",
    [
        pytest.param(receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_FAILED), id="failed"),
        pytest.param(receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_CANCELLED), id="cancelled"),
        pytest.param(receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, tool_run_count=1), id="ran a tool"),
    ],
)
async def test_request_without_a_complete_answer_or_whose_tools_ran_makes_no_pair(
    receipt: receipt_pb2.Receipt,
) -> None:
    stage = Stage()
    await stage.answered(receipt=receipt)
    assert stage.store.submitted == []


async def test_capture_that_ends_during_the_answer_makes_no_pair() -> None:
    stage = Stage()
    sampled = stage.ended.observe(stage.view, CONTEXT, CHAT)
    assert sampled is not None
    stage.view = view_of(TRIAL, capture=False)
    sampled.end(COMPLETED)
    await stage.ended.stop()
    assert stage.store.submitted == []


async def test_full_trial_makes_no_pair_until_it_is_changed_or_pairs_are_deleted() -> None:
    stage = Stage()
    for number in range(5):
        await stage.answered(replace(CONTEXT, request_id=f"r{number}"))
    assert (len(stage.store.submitted), stage.store.listings) == (2, 3)
    stage.view = view_of(changed(max_pairs=3))
    await stage.answered()
    assert len(stage.store.submitted) == 3
    await stage.answered()
    stage.store.submitted.pop()
    await stage.clock.advance(COUNT_SECONDS)
    await stage.answered()
    assert len(stage.store.submitted) == 3


async def test_refused_pair_is_logged_and_the_next_trial_still_gets_its_own() -> None:
    stage = Stage(store=Store(WeftError(Reason.TOO_MANY_RESOURCES, "the tenant has too many tasks")))
    with capture_logs() as logs:
        await stage.answered()
    assert [(each["event"], each["trial"], each["why"]) for each in logs] == [
        ("trial pair dropped", "t", "the tenant has too many tasks")
    ]
    stage = Stage(TRIAL, changed(name="u", candidate="newer"))
    await stage.answered()
    assert [each.spec.model for each in stage.store.submitted] == ["new", "newer"]


async def test_process_without_a_task_store_follows_no_request() -> None:
    submitter = observer(ObserverParts(tasks=lambda: None, view=lambda: view_of(TRIAL), clock=FakeClock()))
    assert not submitter.wants(view_of(TRIAL), CONTEXT, CHAT)
