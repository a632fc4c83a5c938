"""How requests of the lane end: by the runner's report, by the proxy's log, by both, by neither."""

import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from picker_stage import PickerStage, grant, log_entry, picker_stage

from gateway.picker.lane_requests import SWEEP_SECONDS
from gateway.picker.limits import PickerLimits
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.envoy.v1 import access_log_pb2
from weft.dispatch.placement import Grant
from weft.kernel.reasons import Reason
from weft_app.cli.explain import receipt_lines

LIMITS = PickerLimits(report_wait_seconds=2.0, end_report_limit_seconds=30.0)
ASKS_FOR_USAGE = (
    b'{"model":"tiny","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"x"}]}'
)


@asynccontextmanager
async def routed(folder: Path, *grants: Grant, body: bytes = ASKS_FOR_USAGE) -> AsyncIterator[PickerStage]:
    """A stage with one request under way."""
    async with picker_stage(folder, limits=LIMITS) as stage:
        stage.scheduler.script.put_nowait(grants[0] if grants else grant())
        await stage.ask(body)
        yield stage


def told(*, reason: Reason = Reason.UNSPECIFIED, tokens: tuple[int, int] | None = (11, 6)) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(reason=reason.value, model_digest="sha256:1")  # type: ignore[arg-type]
    receipt.attempts.add(runner="as the runner knows it")
    if tokens is not None:
        receipt.usage.CopyFrom(usage_pb2.Usage(prompt_tokens=tokens[0], completion_tokens=tokens[1]))
    return receipt


async def test_the_runners_report_ends_a_request_at_once_and_the_log_is_added(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        assert stage.report(grant(), told())
        reason, receipt = await stage.end()
        assert (reason, receipt.outcome) == (Reason.UNSPECIFIED, receipt_pb2.OUTCOME_COMPLETED)
        assert (receipt.usage.completion_tokens, receipt.model_digest) == (6, "sha256:1")
        assert receipt.time_to_first_token.ToMilliseconds() == 500
        assert [each.runner for each in receipt.attempts] == ["r1"]
        assert not receipt.HasField("proxy")
        await stage.log(log_entry(usage=(11, 6)))
        (amended,) = stage.amended
        assert (amended.proxy.status, amended.proxy.endpoint) == (200, "10.0.0.1:8081")
        assert not amended.proxy.disagreements
        assert await stage.figure("weft_truth_disagreements_total") == 0


async def test_a_report_counts_once(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        assert stage.report(grant(), told())
        assert not stage.report(grant(), told())
        await stage.end()


async def test_after_the_log_the_runners_report_is_waited_for_a_moment(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry(usage=(11, 6)))
        await stage.clock.advance(1.0)
        assert stage.scheduler.finished.empty()
        assert stage.report(grant(), told())
        _, receipt = await stage.end()
        assert (receipt.proxy.status, receipt.model_digest) == (200, "sha256:1")


async def test_an_answer_that_the_log_saw_end_well_holds_its_slot_no_longer(tmp_path: Path) -> None:
    """Reports came so late under load that 32 callers of 64 slots were refused with queue_full."""
    async with routed(tmp_path) as stage:
        await stage.log(log_entry(usage=(11, 6)))
        assert stage.scheduler.freed == 1
        assert stage.scheduler.finished.empty()


@pytest.mark.parametrize("flag", ["downstream_connection_termination", "upstream_remote_reset"])
async def test_an_answer_that_broke_off_holds_its_slot_until_its_runner_has_reported(tmp_path: Path, flag: str) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry(flag, usage=(11, 6)))
        assert stage.report(grant(), told())
        _, receipt = await stage.end()
        assert list(receipt.proxy.flags) == [flag]
        assert stage.scheduler.freed == 0


async def test_without_the_runners_report_the_log_is_the_only_witness(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry(usage=(11, 6)))
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        reason, receipt = await stage.end()
        assert (reason, receipt.usage.prompt_tokens, receipt.proxy.status) == (Reason.UNSPECIFIED, 11, 200)
        assert await stage.figure('weft_picker_ends_total{witness="proxy"}') == 1


async def test_a_report_that_comes_after_the_wait_for_it_corrects_the_receipt(tmp_path: Path) -> None:
    silent = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}]}'
    async with routed(tmp_path, body=silent) as stage:
        # An answer without usage: whether it was whole, the log does not say.
        await stage.log(log_entry())
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        reason, receipt = await stage.end()
        assert (reason, receipt.HasField("usage")) == (Reason.WORKER_LOST, False)
        assert Reason(receipt.attempts[0].reason) is Reason.WORKER_LOST
        await stage.clock.advance(LIMITS.end_report_limit_seconds - 1)
        assert stage.report(grant(), told())
        (amended,) = stage.amended
        assert (amended.outcome, amended.reason) == (receipt_pb2.OUTCOME_COMPLETED, 0)
        assert (amended.usage.completion_tokens, amended.proxy.status) == (6, 200)
        assert amended.total_time == receipt.total_time
        assert Reason(amended.attempts[0].reason) is Reason.UNSPECIFIED
        assert not stage.report(grant(), told())
        assert len(stage.amended) == 1


async def test_an_end_that_is_kept_for_long_does_not_hold_back_those_that_are_kept_for_a_moment(tmp_path: Path) -> None:
    """They were forgotten in the order of their ends: one whose runner was silent kept all that ended after it."""
    async with picker_stage(tmp_path, limits=LIMITS) as stage:

        async def asked(name: str) -> str:
            stage.scheduler.script.put_nowait(grant())
            first, *_ = await stage.ask(ASKS_FOR_USAGE, x_request_id=name)
            changed = [each.header for each in first.request_headers.response.header_mutation.set_headers]
            return next(each.raw_value.decode() for each in changed if each.key == "x-request-id")

        assert await asked("silent") == "silent"
        await stage.log(log_entry(request_id="silent"))
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        await stage.end()
        assert await asked("reported") == "reported"
        stage.report(grant(), told())
        await stage.end()
        # An id of a request that is remembered is not used again.
        assert await asked("reported") != "reported"
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        assert await asked("reported") == "reported"
        assert await asked("silent") != "silent"


async def test_no_body_is_held_once_the_proxy_has_it(tmp_path: Path) -> None:
    """Bodies were held to the end of their requests and beyond: as much memory as the callers of a minute had sent."""
    count, size = 16, 250_000
    long = ASKS_FOR_USAGE.replace(b'"x"', b'"' + b"x" * size + b'"')
    async with picker_stage(tmp_path, limits=LIMITS) as stage, AsyncExitStack() as streams:
        stage.scheduler.script.put_nowait(grant())
        await stage.ask(ASKS_FOR_USAGE, x_request_id="first")
        tracemalloc.start()
        streams.callback(tracemalloc.stop)
        for number in range(count):
            stage.scheduler.script.put_nowait(grant())
            call = await streams.enter_async_context(stage.asking(long, x_request_id=f"long-{number}"))
            answer = await call.read()
            while not answer.request_body.response.body_mutation.streamed_response.end_of_stream:
                answer = await call.read()
        del answer
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    assert len(stage.scheduler.placed) == count + 1
    assert held < 2 * size, "one at most is on its way"


async def test_the_first_byte_that_the_proxy_saw_is_in_its_part_and_is_no_first_token(tmp_path: Path) -> None:
    entry = log_entry(usage=(11, 6))
    entry.common_properties.time_to_first_upstream_rx_byte.FromMilliseconds(40)
    async with routed(tmp_path) as stage:
        await stage.log(entry)
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        _, receipt = await stage.end()
    assert receipt.proxy.time_to_first_byte.ToMilliseconds() == 40
    assert not receipt.HasField("time_to_first_token")
    assert any("the first after 0.04 s" in line for line in receipt_lines(receipt)), receipt_lines(receipt)


async def test_a_clean_end_in_mid_answer_is_a_cut_off_answer(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry())
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        reason, receipt = await stage.end()
        assert (reason, receipt.outcome) == (Reason.WORKER_LOST, receipt_pb2.OUTCOME_FAILED)
        assert stage.scheduler.begun == [1]


async def test_an_endpoint_that_was_never_reached_is_not_waited_for(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry("upstream_connection_failure", status=503, endpoint=""))
        reason, receipt = await stage.end()
        assert reason is Reason.CONNECT_FAILED
        assert [Reason(each.reason) for each in receipt.attempts] == [Reason.CONNECT_FAILED]
        assert list(receipt.proxy.flags) == ["upstream_connection_failure"]


async def test_a_caller_that_leaves_in_mid_answer_has_cancelled(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.log(log_entry("downstream_connection_termination"))
        assert stage.report(grant(), told(reason=Reason.CANCELLED))
        reason, receipt = await stage.end()
        assert (reason, receipt.outcome) == (Reason.CANCELLED, receipt_pb2.OUTCOME_CANCELLED)
        assert not receipt.proxy.disagreements


@pytest.mark.parametrize("report_first", [True, False])
async def test_witnesses_that_disagree_are_counted_and_shown(tmp_path: Path, *, report_first: bool) -> None:
    async with routed(tmp_path) as stage:
        if report_first:
            stage.report(grant(), told())
            await stage.log(log_entry("upstream_remote_reset"))
            await stage.end()
            receipt = stage.amended[0]
        else:
            await stage.log(log_entry("upstream_remote_reset"))
            stage.report(grant(), told())
            _, receipt = await stage.end()
        assert list(receipt.proxy.disagreements) == [
            "end: the runner reports a complete answer, the proxy saw worker_lost"
        ]
        assert await stage.figure('weft_truth_disagreements_total{about="end"}') == 1


async def test_a_dead_first_endpoint_is_an_attempt_of_the_receipt(tmp_path: Path) -> None:
    second = grant(2, "r2")
    async with routed(tmp_path, grant(1, "r1", second)) as stage:
        stage.report(second, told())
        await stage.log(log_entry(usage=(11, 6), endpoint="10.0.0.2:8081"))
        reason, receipt = await stage.end()
        assert reason is Reason.UNSPECIFIED
        assert [(each.runner, Reason(each.reason)) for each in receipt.attempts] == [
            ("r1", Reason.CONNECT_FAILED),
            ("r2", Reason.UNSPECIFIED),
        ]


async def test_the_report_of_a_failed_attempt_that_comes_after_the_end_corrects_the_receipt(tmp_path: Path) -> None:
    second = grant(2, "r2")
    async with routed(tmp_path, grant(1, "r1", second)) as stage:
        stage.report(second, told())
        _, receipt = await stage.end()
        assert Reason(receipt.attempts[0].reason) is Reason.CONNECT_FAILED
        await stage.log(log_entry(usage=(11, 6), endpoint="10.0.0.2:8081"))
        await stage.clock.advance(LIMITS.end_report_limit_seconds - 1)
        assert stage.report(grant(1, "r1"), told(reason=Reason.SERVER_DIED, tokens=None), first_content=None)
        amended = stage.amended[-1]
        assert [(each.runner, Reason(each.reason)) for each in amended.attempts] == [
            ("r1", Reason.SERVER_DIED),
            ("r2", Reason.UNSPECIFIED),
        ]
        # All else is as it was.
        assert (amended.outcome, amended.usage.completion_tokens) == (receipt_pb2.OUTCOME_COMPLETED, 6)
        assert (amended.proxy.status, amended.total_time) == (200, receipt.total_time)
        assert amended.time_to_first_token == receipt.time_to_first_token
        assert await stage.figure("weft_truth_disagreements_total") == 0


async def test_a_corrected_receipt_of_a_cancelled_request_keeps_its_usage(tmp_path: Path) -> None:
    second = grant(2, "r2")
    async with routed(tmp_path, grant(1, "r1", second)) as stage:
        stage.report(second, told(reason=Reason.CANCELLED))
        await stage.end()
        stage.report(grant(1, "r1"), told(reason=Reason.SERVER_DIED, tokens=None), first_content=None)
        amended = stage.amended[-1]
        assert (amended.outcome, amended.usage.completion_tokens) == (receipt_pb2.OUTCOME_CANCELLED, 6)


async def test_a_runner_that_refuses_before_content_leaves_the_end_to_the_next_endpoint(tmp_path: Path) -> None:
    second = grant(2, "r2")
    async with routed(tmp_path, grant(1, "r1", second)) as stage:
        stage.report(grant(1, "r1"), told(reason=Reason.NO_SLOT_AVAILABLE, tokens=None), first_content=None)
        assert stage.scheduler.finished.empty()
        stage.report(second, told())
        _, receipt = await stage.end()
        assert [Reason(each.reason) for each in receipt.attempts] == [Reason.NO_SLOT_AVAILABLE, Reason.UNSPECIFIED]


async def test_the_refusal_of_the_only_endpoint_ends_the_request(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        stage.report(grant(), told(reason=Reason.BACKEND_NOT_READY, tokens=None), first_content=None)
        reason, receipt = await stage.end()
        assert reason is Reason.BACKEND_NOT_READY
        # It read "answered" before.
        assert [Reason(each.reason) for each in receipt.attempts] == [Reason.BACKEND_NOT_READY]


async def test_an_end_that_nobody_reports_comes_after_the_deadline_and_a_limit(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.clock.advance(600.0)
        assert stage.scheduler.finished.empty()
        await stage.clock.advance(LIMITS.end_report_limit_seconds + SWEEP_SECONDS)
        reason, _ = await stage.end()
        assert reason is Reason.DEADLINE_EXCEEDED
        assert await stage.figure('weft_picker_ends_total{witness="none"}') == 1


async def test_signs_of_life_keep_a_request_and_their_absence_ends_it_within_the_limit(tmp_path: Path) -> None:
    sign = log_entry()
    sign.common_properties.intermediate_log_entry = True
    async with routed(tmp_path) as stage:
        for _ in range(3):
            await stage.log(sign)
            await stage.clock.advance(LIMITS.end_report_limit_seconds - 1)
            assert stage.scheduler.finished.empty()
        await stage.clock.advance(1 + SWEEP_SECONDS)
        reason, _ = await stage.end()
        assert reason is Reason.DEADLINE_EXCEEDED


async def test_reports_of_requests_that_are_not_known_change_nothing_and_are_counted(tmp_path: Path) -> None:
    lost = log_entry(request_id="of-an-earlier-picker", usage=(1, 1))
    lost.common_properties.metadata.filter_metadata["envoy.lb"].fields["x-weft-placed"].string_value = "tiny on r1"
    async with routed(tmp_path) as stage:
        await stage.log(lost)
        stage.scheduler.placed.append(stage.scheduler.placed[0])
        assert not stage.report(grant(7), told())
        assert stage.scheduler.finished.empty()
        assert await stage.figure('weft_picker_unknown_ends_total{witness="proxy"}') == 1
        assert await stage.figure('weft_picker_unknown_ends_total{witness="runner"}') == 1


async def test_an_entry_that_cannot_be_read_costs_no_other_entry(tmp_path: Path) -> None:
    broken = log_entry()
    broken.common_properties.metadata.typed_filter_metadata["usage"].type_url = "t/envoy.data.ai.v3.TokenUsage"
    broken.common_properties.metadata.typed_filter_metadata["usage"].value = b"\xff\xff\xff"
    async with routed(tmp_path) as stage:
        await stage.log(broken, access_log_pb2.HTTPAccessLogEntry(), log_entry(usage=(11, 6)))
        await stage.clock.advance(LIMITS.report_wait_seconds + SWEEP_SECONDS)
        reason, _ = await stage.end()
        assert reason is Reason.UNSPECIFIED


async def test_what_the_proxy_goes_on_with_at_the_stop_of_the_picker_is_lost_with_it(tmp_path: Path) -> None:
    async with routed(tmp_path) as stage:
        await stage.picker.stop(0.0)
        reason, _ = await stage.end()
        assert reason is Reason.ROUTER_LOST
