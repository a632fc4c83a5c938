"""`/v1/trials`: the report of a trial, and its pairs as people judge them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gateway_script import FixedFleet, RunningGateway, model, serving
from kit.keys import Keys
from task_script import ScriptedTasks, output

from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.api.registry.v1 import trial_service_pb2 as pb
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.api.registry.v1.trial_pb2 import Trial, TrialManifest
from weft.api.router.v1 import task_pb2
from weft.api.router.v1.task_service_pb2 import SubmitTaskRequest
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.text.json_objects import to_json_object
from weft.kernel.time.timestamps import duration_of
from weft_extensions.trials.pair_tasks import is_candidate_first, pair_of

NAME, REPORT = "old-or-new", "/v1/trials/old-or-new"
KEYS = Keys(
    {
        "ann000000000": ("inference:*",),
        "viewer000000": ("*:view",),
        "bob000000000": ("inference:*",),
        "service00000": ("mesh:*", "inference:*"),
    },
    "ann",
    tenants={"bob000000000": "bob"},
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def answer(text: str, *calls: tuple[str, str], tokens: int = 10, first_seconds: float = 0.5) -> task_pb2.TaskOutput:
    """A whole answer."""
    pieces = [
        event_pb2.ToolCallDelta(index=index, id=f"c{index}", name=name, arguments_text=arguments)
        for index, (name, arguments) in enumerate(calls)
    ]
    receipt = receipt_pb2.Receipt(
        outcome=receipt_pb2.OUTCOME_COMPLETED,
        usage=usage_pb2.Usage(completion_tokens=tokens),
        queue_wait=duration_of(0.1),
        load_wait=duration_of(0.2),
        time_to_first_token=duration_of(first_seconds),
        tokens_per_second=20.0,
    )
    delta = event_pb2.Delta(text=text, tool_calls=pieces)
    return output(
        [
            event_pb2.InferenceEvent(delta=delta),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]
    )


@dataclass
class Judge:
    """The registry's TrialService."""

    fleet: FixedFleet
    asked: list[pb.JudgePairRequest] = field(default_factory=list)

    async def JudgePair(self, request: pb.JudgePairRequest, *, timeout: float) -> pb.JudgePairResponse:  # noqa: N802 - the name of the rpc
        self.asked.append(request)
        trial = self.fleet.view.trials[request.trial]
        trial.verdicts[request.task] = request.verdict
        return pb.JudgePairResponse(trial=trial)


@dataclass
class Stage:
    """A gateway with a trial of ann's."""

    gateway: RunningGateway
    tasks: ScriptedTasks
    judge: Judge
    trial: Trial

    async def pair(
        self,
        request_id: str,
        against: task_pb2.TaskOutput,
        candidate: task_pb2.TaskOutput | None = None,
        *,
        payload: chat_pb2.ChatPayload | None = None,
    ) -> str:
        """Adds a pair, answered if there is an answer of the candidate. Returns its task."""
        context = RequestContext(
            request_id=request_id,
            tenant="ann",
            model="old",
            operation=Operation.CHAT,
            traceparent=new_traceparent(),
        )
        asked = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="What is it?")])
        asks = payload or chat_pb2.ChatPayload()
        asks.messages.append(asked)
        task = (await self.tasks.submit("ann", pair_of(self.trial.manifest, context, asks, against))).task.id
        if candidate is not None:
            self.tasks.begin(task)
            self.tasks.say(candidate, task)
            self.tasks.complete(task)
        return task

    async def report(self, key: str = "ann000000000") -> Any:
        return (await self.gateway.request("GET", REPORT, key=key)).of(200)

    async def shown(self, task: str) -> Any:
        response = await self.gateway.request("GET", f"{REPORT}/pairs/{task}", key="ann000000000")
        assert response.headers["cache-control"] == "no-store"
        return response.of(200)

    async def judged(self, task: str, verdict: str, key: str = "ann000000000") -> Any:
        path = f"{REPORT}/pairs/{task}/verdict"
        return await self.gateway.request("POST", path, {"verdict": verdict}, key=key)


@asynccontextmanager
async def staged(*, capture: bool = True, max_pairs: int = 100) -> AsyncIterator[Stage]:
    trial = Trial(
        manifest=TrialManifest(
            name=NAME, candidate="new", against="old", tenant="ann", share_percent=10, max_pairs=max_pairs
        )
    )
    fleet = FixedFleet.of(model("old"), model("new"))
    tenant = Tenant(manifest=TenantManifest(name="ann", capture=capture))
    fleet = FixedFleet(replace(fleet.view, trials={NAME: trial}, tenants={"ann": tenant}))
    tasks, judge = ScriptedTasks(), Judge(fleet)
    async with serving(keys=KEYS, fleet=fleet, tasks=tasks, trials=judge) as gateway:
        yield Stage(gateway, tasks, judge, trial)


def by_requests(*, candidate_first: bool) -> str:
    """The id of a request whose pair shows the candidate's answer first, or not."""
    return next(name for number in range(99) if is_candidate_first(NAME, name := f"r{number}") is candidate_first)


async def test_report_has_every_pair_with_its_state_and_checks() -> None:
    async with staged() as stage:
        schema = chat_pb2.JsonSchemaFormat(name="n", schema=to_json_object(SCHEMA, "schema"))
        payload = chat_pb2.ChatPayload(response_format=chat_pb2.ResponseFormat(json_schema=schema))
        old, new = answer('{"n": "one"}', tokens=20), answer('{"n": 1}', first_seconds=0.4)
        answered = await stage.pair("r1", old, new, payload=payload)
        called = await stage.pair("r2", answer("", ("f", '{"a":1}')), answer("", ("f", '{"a": 2}')))
        waiting = await stage.pair("r3", answer("a"))
        failed = await stage.pair("r4", answer("a"))
        stage.tasks.fail(Reason.BACKEND_ERROR, "it broke", failed)
        report = await stage.report()
        assert await stage.report() == report, "also from its kept checks"
    assert [(each["task"], each["requestId"], each["state"]) for each in report["pairs"]] == [
        (failed, "r4", "failed"),
        (waiting, "r3", "waiting"),
        (called, "r2", "answered"),
        (answered, "r1", "answered"),
    ]
    assert report["pairs"][0]["error"] == "it broke"
    assert report["pairs"][2]["checks"]["sameToolCalls"] is False
    assert report["pairs"][3]["checks"] == {
        "candidateValid": True,
        "againstValid": False,
        "lengthRatio": 0.5,
        "candidateSpeed": {"firstTokenSeconds": pytest.approx(0.1), "tokensPerSecond": 20},
        "againstSpeed": {"firstTokenSeconds": pytest.approx(0.2), "tokensPerSecond": 20},
    }
    counts = {name: report["summary"][name] for name in ("answered", "waiting", "failed", "withSchema")}
    assert counts == {"answered": 2, "waiting": 1, "failed": 1, "withSchema": 1}
    assert (report["candidate"], report["against"], report.get("stopped")) == ("new", "old", None)


@pytest.mark.parametrize(
    ("settings", "words"), [({"capture": False}, "ann has no capture"), ({"max_pairs": 1}, "it has its 1 pairs")]
)
async def test_report_says_why_a_trial_gets_no_further_pairs(settings: dict[str, Any], words: str) -> None:
    async with staged(**settings) as stage:
        await stage.pair("r1", answer("a"))
        assert words in (await stage.report())["stopped"]


@pytest.mark.parametrize("candidate_first", [True, False])
@pytest.mark.parametrize("verdict", ["a", "b", "same"])
async def test_pair_is_blind_until_it_is_judged(verdict: str, *, candidate_first: bool) -> None:
    async with staged() as stage:
        request_id = by_requests(candidate_first=candidate_first)
        task = await stage.pair(request_id, answer("the old answer"), answer("the new answer"))
        before = await stage.shown(task)
        sides = ("the new answer", "the old answer") if candidate_first else ("the old answer", "the new answer")
        assert (before["prompt"], before["a"]["text"], before["b"]["text"]) == ("[user]\nWhat is it?", *sides)
        assert not before.keys() & {"aBy", "verdict"}
        assert "verdict" not in (await stage.report())["pairs"][0]
        after = (await stage.judged(task, verdict)).of(200)
        meant = {"a": candidate_first, "b": not candidate_first}
        won = "same" if verdict == "same" else "candidate" if meant[verdict] else "against"
        assert after == before | {"aBy": "new" if candidate_first else "old", "verdict": won}
        assert await stage.shown(task) == after
        assert (await stage.report())["pairs"][0]["verdict"] == won
    assert [(each.task, each.tenant) for each in stage.judge.asked] == [(task, "ann")]


async def test_trial_of_another_tenant_is_not_there() -> None:
    async with staged() as stage:
        task = await stage.pair("r1", answer("a"), answer("b"))
        paths = (("GET", REPORT), ("GET", f"{REPORT}/pairs/{task}"), ("GET", "/v1/trials/unknown"))
        found = [await stage.gateway.request(method, path, key="bob000000000") for method, path in paths]
        assert [each.status for each in found] == [404, 404, 404]
        assert (await stage.judged(task, "a", "bob000000000")).status == 404
        assert (await stage.report("service00000"))["name"] == NAME, "it may name tenants"
    assert stage.judge.asked == []


async def test_task_that_is_no_pair_of_the_trial_or_not_answered_cannot_be_judged() -> None:
    async with staged() as stage:
        spec = task_pb2.TaskSpec(model="new", chat=chat_pb2.ChatPayload())
        own = await stage.tasks.submit("ann", SubmitTaskRequest(spec=spec))
        spec.origin_kind, spec.origin = f"trial:{NAME}", b"\xff"
        forged = await stage.tasks.submit("ann", SubmitTaskRequest(spec=spec))
        stage.tasks.begin(forged.task.id)
        stage.tasks.complete(forged.task.id)
        waiting = await stage.pair("r1", answer("a"))
        statuses = [
            (await stage.judged(task, "a")).status for task in (own.task.id, forged.task.id, "task-unknown", waiting)
        ]
        assert statuses == [404, 404, 404, 409]
        assert [each["state"] for each in (await stage.report())["pairs"]] == ["waiting", "failed"]
        answered = await stage.pair("r2", answer("a"), answer("b"))
        assert (await stage.judged(answered, "c")).status == 400
        assert (await stage.judged(answered, "a", "viewer000000")).status == 403
    assert stage.judge.asked == []
