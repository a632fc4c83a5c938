"""Requests with tickets at a runner's HTTP API, over a real runner and its engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from ticketed_stage import TicketedStage, chat, counting_model, ticketed_runner, until

from weft.api.common.v1 import receipt_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.tickets import TICKET_HEADER
from weft.kernel.reasons import Reason
from weft.kernel.report_limits import ReportLimits


def _events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


async def test_a_ticket_is_all_that_a_request_needs_and_its_tenant_id_and_model_are_those_of_the_ticket(
    tmp_path: Path,
) -> None:
    async with ticketed_runner(tmp_path) as stage:
        terms = ticket_pb2.LaneTerms(report_to="router-1", asked_model="best", caller="key:abc")
        terms.queue_wait.FromMilliseconds(1500)
        # The Host and the Origin are those of the proxy's callers.
        foreign = {"Host": "api.example.org", "x-request-id": "of-the-caller"}
        async with stage.post(stage.ticket(lane=terms), **foreign) as response:
            answer = await response.json()
        (report,) = await stage.router.until(1)
    assert response.status == 200
    assert response.headers["x-request-id"] == "req-1"
    assert response.headers["x-queue-wait-ms"] == "1500", "the wait at the router"
    assert answer["choices"][0]["message"]["content"].startswith("tok0 tok1")
    assert answer["model"] == "m"
    receipt = report.receipt
    assert (receipt.request_id, receipt.model, receipt.asked_model, receipt.host) == ("req-1", "m", "best", "h")
    assert receipt.outcome == receipt_pb2.OUTCOME_COMPLETED
    assert receipt.usage.completion_tokens == 8
    assert [attempt.runner for attempt in receipt.attempts] == ["r1"]
    assert report.HasField("time_to_first_content")
    assert receipt.queue_wait.ToMilliseconds() == 1500
    assert receipt.time_to_first_token.ToMilliseconds() >= 1500


async def test_a_stream_is_the_gateways_and_is_reported_once(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        body = chat(stream=True, stream_options={"include_usage": True})
        async with stage.post(stage.ticket(), body=body) as response:
            text = await response.text()
        await stage.router.until(1)
        await until(lambda: stage.reporter.held == 0)
        assert (len(stage.router.ends), stage.router.calls) == (1, 1)
        assert stage.fates() == {"accepted": 1.0}
        assert stage.served() == 1.0
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = _events(text)
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in chunks if each["choices"]) == (
        "tok0 tok1 tok2 tok3 tok4 tok5 tok6 tok7"
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert text.endswith("data: [DONE]\n\n")


async def test_completions_and_counts_of_tokens_are_served_too(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        completion = {"model": "best", "prompt": "Count.", "max_tokens": 2}
        async with stage.post(stage.ticket(), "/v1/completions", completion) as response:
            assert (response.status, (await response.json())["choices"][0]["text"]) == (200, "tok0 tok1")
        async with stage.post(stage.ticket(), "/tokenize", {"model": "best", "prompt": "a b c"}) as response:
            assert response.status == 200, await response.text()
        assert len(await stage.router.until(2)) == 2


async def test_a_ticket_passes_once_and_a_second_use_is_neither_served_nor_reported(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        ticket = stage.ticket()
        async with stage.post(ticket) as first, stage.post(ticket) as second:
            assert (first.status, second.status) == (200, 503)
            assert second.headers["x-weft-reason"] == "TICKET_INVALID"
            await first.read()
        await stage.router.until(1)
        assert stage.router.calls == 1
        assert stage.served() == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"seconds": -1.0}, "TICKET_EXPIRED", id="expired"),
        pytest.param({"key": b"x" * 32}, "TICKET_INVALID", id="forged"),
        pytest.param({"runner": "r2"}, "TICKET_INVALID", id="of another runner"),
        pytest.param({"runner_incarnation": "earlier"}, "TICKET_INVALID", id="of an earlier life"),
    ],
)
async def test_a_ticket_that_is_not_good_admits_nothing_and_the_proxy_tries_the_next_runner(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    async with ticketed_runner(tmp_path) as stage:
        async with stage.post(stage.ticket(**changes)) as response:
            body = await response.json()
        assert (response.status, response.headers["x-weft-reason"]) == (503, reason)
        assert body["error"]["code"] == reason.lower()
        assert response.headers["x-request-id"] != "req-1", "claims that are not proven say nothing"
        # The negative control: the same request with a good ticket.
        async with stage.post(stage.ticket()) as response:
            assert response.status == 200
            await response.read()
        assert len(await stage.router.until(1)) == stage.router.calls == 1


@pytest.mark.parametrize("text", ["", "abc", "a.b", "YWJj.YWJj", ",".join(["YWJj.YWJj"] * 9)])
async def test_a_header_that_holds_no_ticket_is_refused_and_not_served_as_if_it_were_absent(
    tmp_path: Path, text: str
) -> None:
    async with ticketed_runner(tmp_path) as stage:
        async with stage.post(text) as response:
            assert (response.status, response.headers["x-weft-reason"]) == (503, "TICKET_INVALID")
        assert stage.served() == 0.0


async def test_of_several_tickets_a_runner_takes_the_one_that_is_made_out_to_it(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        others = [stage.ticket(key=b"2" * 32, runner="r2"), stage.ticket(key=b"3" * 32, runner="r3")]
        own = stage.ticket()
        async with stage.post(", ".join([others[0], own, others[1]])) as response:
            assert (response.status, response.headers["x-request-id"]) == (200, "req-3")
            await response.read()
        await stage.router.until(1)
    assert [claims.ticket_id for claims, _ in stage.router.ends] == ["ticket-3"]


async def test_two_headers_of_tickets_are_refused(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        headers = [(TICKET_HEADER, stage.ticket()), (TICKET_HEADER, stage.ticket())]
        url = f"{stage.service.url}/v1/chat/completions"
        async with stage.http.post(url, json=chat(), headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "malformed_request")


async def test_a_body_that_is_wrong_has_its_own_status_and_its_end_is_reported(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        async with stage.post(stage.ticket(), body=chat(temperature="hot")) as response:
            assert (response.status, response.headers["x-weft-reason"]) == (400, "INVALID_ARGUMENT")
            assert (await response.json())["error"]["param"] == "temperature"
        (report,) = await stage.router.until(1)
    assert (report.receipt.reason, report.receipt.outcome) == (
        Reason.INVALID_ARGUMENT.value,
        receipt_pb2.OUTCOME_FAILED,
    )
    assert not report.HasField("time_to_first_content")


async def test_other_paths_than_those_of_inference_have_nothing_for_a_ticket(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        for path in ("/v1/models/load", "/v1/cache/flush", "/v1/images/generations"):
            async with stage.post(stage.ticket(), path) as response:
                assert response.status == 404
        assert len(await stage.router.until(3)) == 3


async def test_an_engine_that_dies_before_the_first_token_is_503_with_its_reason_also_when_that_takes_long(
    tmp_path: Path,
) -> None:
    model = counting_model(prefill_seconds=2.5, crash_after_tokens=0)
    async with ticketed_runner(tmp_path, model) as stage:
        async with stage.post(stage.ticket(), body=chat(stream=True)) as response:
            assert response.status == 503
            assert response.headers["x-weft-reason"] == "SERVER_DIED"
            assert response.headers["content-type"] == "application/json"
        (report,) = await stage.router.until(1)
    assert report.receipt.reason == Reason.SERVER_DIED.value
    assert not report.HasField("time_to_first_content")


async def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event(tmp_path: Path) -> None:
    model = counting_model(crash_after_tokens=3, tokens_per_second=50)
    async with ticketed_runner(tmp_path, model) as stage:
        async with stage.post(stage.ticket(), body=chat(stream=True)) as response:
            assert response.status == 200
            text = await response.text()
        (report,) = await stage.router.until(1)
    assert _events(text)[-1]["error"]["code"] == "server_died"
    assert "[DONE]" not in text
    assert report.receipt.reason == Reason.SERVER_DIED.value
    assert report.HasField("time_to_first_content")


async def test_an_answer_in_one_piece_whose_engine_dies_after_it_has_begun_is_not_tried_elsewhere(
    tmp_path: Path,
) -> None:
    model = counting_model(crash_after_tokens=3, tokens_per_second=50)
    async with ticketed_runner(tmp_path, model) as stage:
        async with stage.post(stage.ticket()) as response:
            assert (response.status, response.headers["x-weft-reason"]) == (502, "SERVER_DIED")
        (report,) = await stage.router.until(1)
    assert report.HasField("time_to_first_content")


async def test_a_full_runner_is_503_with_its_reason(tmp_path: Path) -> None:
    model = counting_model(tokens_per_second=5, answer_tokens=0)
    async with ticketed_runner(tmp_path, model, max_requests=1) as stage:
        async with stage.post(stage.ticket(), body=chat(stream=True, max_tokens=1000)) as running:
            assert running.status == 200
            async with stage.post(stage.ticket()) as refused:
                assert (refused.status, refused.headers["x-weft-reason"]) == (503, "NO_SLOT_AVAILABLE")
        reports = await stage.router.until(2)
    assert {report.receipt.reason for report in reports} == {
        Reason.NO_SLOT_AVAILABLE.value,
        Reason.CANCELLED.value,
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_that_leaves_ends_its_request_at_the_engine(tmp_path: Path, stream: bool) -> None:
    model = counting_model(tokens_per_second=20, answer_tokens=0)
    async with ticketed_runner(tmp_path, model) as stage:
        slots = stage.runner.service.holders_of
        asking = asyncio.create_task(_ask(stage, stream=stream))
        await until(lambda: bool(slots("m")))
        await asyncio.sleep(0.2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not slots("m"))
        (report,) = await stage.router.until(1)
    assert report.receipt.outcome == receipt_pb2.OUTCOME_CANCELLED
    assert report.HasField("time_to_first_content")


async def _ask(stage: TicketedStage, *, stream: bool) -> None:
    async with stage.post(stage.ticket(), body=chat(stream=stream, max_tokens=2000)) as response:
        await response.read()


async def test_a_ticket_that_expires_while_its_body_arrives_is_good(tmp_path: Path) -> None:
    """The proxy was in time; how fast the caller sends is another matter."""
    async with ticketed_runner(tmp_path) as stage:

        async def slowly() -> Any:
            yield b'{"model": "m", "max_tokens": 1, '
            await asyncio.sleep(1.2)
            yield b'"messages": [{"role": "user", "content": "x"}]}'

        headers = {TICKET_HEADER: stage.ticket(seconds=1.0), "Content-Type": "application/json"}
        url = f"{stage.service.url}/v1/chat/completions"
        async with stage.http.post(url, data=slowly(), headers=headers) as response:
            assert response.status == 200, await response.text()
            await response.read()
        await stage.router.until(1)


async def test_a_report_is_repeated_until_the_router_is_there(tmp_path: Path) -> None:
    is_there = asyncio.Event()
    limits = ReportLimits(retry_seconds=0.05)
    async with ticketed_runner(tmp_path, limits=limits, has_router=is_there.is_set) as stage:
        async with stage.post(stage.ticket()) as response:
            await response.read()
        await asyncio.sleep(0.3)
        assert (stage.router.calls, stage.reporter.held) == (0, 1)
        is_there.set()
        await stage.router.until(1)
        await until(lambda: stage.reporter.held == 0)
        assert stage.fates() == {"accepted": 1.0}


async def test_reports_without_a_router_are_bounded_and_each_that_is_dropped_is_counted(tmp_path: Path) -> None:
    limits = ReportLimits(max_held=2, retry_seconds=0.05)
    async with ticketed_runner(tmp_path, limits=limits, has_router=lambda: False) as stage:
        for _ in range(4):
            async with stage.post(stage.ticket()) as response:
                await response.read()
        await until(lambda: stage.fates() == {"overflow": 2.0})
        assert stage.reporter.held == 2
        await stage.reporter.stop(grace_seconds=0.0)
        assert stage.fates() == {"overflow": 2.0, "gave_up": 2.0}


async def test_a_report_is_given_up_after_its_time(tmp_path: Path) -> None:
    limits = ReportLimits(give_up_seconds=0.3, retry_seconds=0.05)
    async with ticketed_runner(tmp_path, limits=limits, has_router=lambda: False) as stage:
        async with stage.post(stage.ticket()) as response:
            await response.read()
        await until(lambda: stage.reporter.held == 0)
        assert stage.fates() == {"gave_up": 1.0}


async def test_a_ticket_of_a_request_that_has_a_dispatcher_is_served_and_not_reported(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        async with stage.post(stage.ticket(lane=None)) as response:
            assert response.status == 200
            await response.read()
        assert stage.reporter.held == 0
        assert stage.fates() == {}


async def test_a_request_without_a_ticket_needs_what_it_needed_before(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        url = f"{stage.service.url}/v1/chat/completions"
        async with stage.http.post(url, json=chat(), headers={"Host": "api.example.org"}) as response:
            assert (response.status, "x-weft-reason" in response.headers) == (403, False)


async def test_requests_with_tickets_leave_no_connection_to_their_runner_behind(tmp_path: Path) -> None:
    """A dispatcher for each request had carriers of its own, and so a stream that stayed open for each."""
    async with ticketed_runner(tmp_path) as stage:

        async def tasks_after(count: int) -> int:
            for _ in range(count):
                async with stage.post(stage.ticket()) as response:
                    await response.read()
            await stage.router.until(len(stage.router.ends))
            await asyncio.sleep(0.1)
            return len(asyncio.all_tasks())

        before = await tasks_after(3)
        assert await tasks_after(20) < before + 10
