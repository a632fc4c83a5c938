"""`weft runner conformance` finds each single broken promise, and reports no fault that is not the runner's."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conformance_saboteurs import SABOTEURS, BusyRunner, HangingRunner, HangsWhenFull
from conformance_subject import BY_NAME, findings_of, subject
from kit.engines import fake_model
from runner_harness import RunningRunner, ready_runner

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft_testing.conformance import runner_suite
from weft_testing.conformance.findings import BrokenPromiseError, Finding, Verdict
from weft_testing.conformance.runner_requests import Check
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import RunnerUnderTest

pytestmark = pytest.mark.slow("starts engine processes")


def _model(**switches: Any) -> ServedModel:
    ours: dict[str, Any] = {"answer_tokens": 0, "tokens_per_second": 200, "prefill_seconds": 0.1}
    return fake_model("m", ours | switches, {"slots": 2, "embeddings": True}, slots=2)


@asynccontextmanager
async def running(folder: Path, **switches: Any) -> AsyncIterator[tuple[RunningRunner, str]]:
    async with ready_runner(folder, [_model(**switches)]) as runner:
        yield runner, f"unix:{folder}/runner.sock"


async def test_each_check_detects_its_broken_promise_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_testing.conformance.runner_suite.NOTICE_SECONDS", 0.3)
    monkeypatch.setattr("weft_testing.conformance.runner_suite.GONE_SECONDS", 0.3)
    wrong: list[tuple[str, str, str]] = []
    async with running(tmp_path) as (runner, address):
        for saboteur in SABOTEURS:
            async with subject(runner, address, saboteur.kind) as broken:
                finding = (await findings_of(broken, (BY_NAME[saboteur.check],)))[saboteur.check]
            if finding.verdict is not Verdict.BROKEN or not finding.detail.startswith(saboteur.words):
                wrong.append((saboteur.check, saboteur.words, f"{finding.verdict}: {finding.detail}"))
    assert wrong == []
    assert {saboteur.check for saboteur in SABOTEURS} == set(BY_NAME), "every check has a saboteur"


async def test_unresponsive_runner_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_suite, "CHECK_SECONDS", 0.2)
    async with running(tmp_path) as (runner, address), subject(runner, address, HangingRunner) as hanging:
        finding = (await findings_of(hanging, (BY_NAME["event-order"],)))["event-order"]
    assert (finding.verdict, finding.detail) == (Verdict.BROKEN, "it did not come to an end within 0.2 s")


async def test_checks_are_skipped_while_the_runner_serves_foreign_requests(tmp_path: Path) -> None:
    async with running(tmp_path) as (runner, address), subject(runner, address) as tested:
        others = [runner.generate(max_tokens=100_000) for _ in range(2)]
        for other in others:
            while not any(event.HasField("delta") for event in (await other.read()).events):
                pass
        found = await findings_of(tested, tuple(BY_NAME[name] for name in ("tickets", "typed-errors", "slots")))
        for other in others:
            other.cancel()
    assert {finding.detail for finding in found.values()} == {"it is busy with 2 requests of others"}
    assert {finding.verdict for finding in found.values()} == {Verdict.NOT_CHECKED}


async def test_runner_that_always_reports_no_slot_is_broken(tmp_path: Path) -> None:
    async with running(tmp_path) as (runner, address), subject(runner, address, BusyRunner) as full:
        finding = (await findings_of(full, (BY_NAME["event-order"],)))["event-order"]
    assert finding.verdict is Verdict.BROKEN
    assert finding.detail.startswith("NO_SLOT_AVAILABLE")


class LooksLate(RunnerUnderTest):
    """Looks for the record of a request when its answer has ended, as on a busy machine."""

    async def find_request(self, request_id: str) -> runner_service_pb2.GetRequestResponse:
        while True:
            found = await super().find_request(request_id)
            if found.record.state == found.record.STATE_COMPLETED:
                return found
            await asyncio.sleep(0)


async def test_answer_that_ends_too_early_is_not_checked(tmp_path: Path) -> None:
    async with running(tmp_path, answer_tokens=1) as (runner, address), subject(runner, address, LooksLate) as terse:
        finding = (await findings_of(terse, (BY_NAME["request-record"],)))["request-record"]
    assert finding.detail == "the model ended its answer before the check was made"
    assert finding.verdict is Verdict.NOT_CHECKED


async def test_embeddings_only_model_is_not_sent_chats(tmp_path: Path) -> None:
    embeds = frozenset({int(model_pb2.MODEL_OPERATION_EMBEDDING)})
    async with running(tmp_path) as (runner, address), subject(runner, address, operations=embeds) as tested:
        found = await findings_of(tested, CHECKS[1:])
    honoured = {name for name, finding in found.items() if finding.verdict is Verdict.HONOURED}
    assert honoured >= {"embeddings", "load-then-unload", "teardown"}
    assert [finding.detail for finding in found.values() if finding.verdict is Verdict.BROKEN] == []
    assert found["tickets"].detail == "the model does not chat"


async def test_global_request_limit_counts_as_slots(tmp_path: Path) -> None:
    async with running(tmp_path) as (runner, address), subject(runner, address, max_requests=1) as tested:
        finding = (await findings_of(tested, (BY_NAME["slots"],)))["slots"]
    assert finding.detail == "expected NO_SLOT_AVAILABLE, but it succeeded", (
        "the runner has no such limit: one more fits"
    )


async def test_sleeping_model_is_put_back_to_sleep_afterwards(tmp_path: Path) -> None:
    async with running(tmp_path) as (runner, address), subject(runner, address) as tested:
        await runner.unload()
        found = await findings_of(tested, (BY_NAME["event-order"], BY_NAME["load-then-unload"]))
        assert {finding.verdict for finding in found.values()} == {Verdict.HONOURED}
        await runner.until(Phase.HIBERNATING)


async def test_interrupted_check_leaves_no_request_and_the_model_awake(tmp_path: Path) -> None:
    async def unload_and_hang(subject: RunnerUnderTest) -> str:
        await subject.unload()
        await asyncio.Event().wait()
        raise BrokenPromiseError

    hanging = Check(name="hang", promise="hangs", run=unload_and_hang, unloads=True)
    async with running(tmp_path) as (runner, address), subject(runner, address, HangsWhenFull) as tested:
        for check in (hanging, BY_NAME["slots"], BY_NAME["load-then-unload"]):
            examining = asyncio.create_task(findings_of(tested, (check,)))
            await asyncio.sleep(0.2)
            examining.cancel()
            await asyncio.wait({examining})
            assert examining.cancelled()
            assert (await tested.state()).phase == Phase.READY.value
        await runner.until_idle("m")


async def test_model_state_is_restored_if_the_findings_reader_stops_early(tmp_path: Path) -> None:
    async with running(tmp_path) as (runner, address), subject(runner, address) as tested:
        await runner.unload()
        findings: AsyncGenerator[Finding] = examine(tested, (BY_NAME["description"],))
        await anext(findings)
        await findings.aclose()
        await runner.until(Phase.HIBERNATING)
