"""Cancellation of requests with tickets: while they run, before they come, after their ends."""

import asyncio
import json
from pathlib import Path

from ticketed_stage import chat, counting_model, ticketed_runner, until

from weft.api.common.v1 import receipt_pb2
from weft.kernel.reasons import Reason


async def test_a_stream_that_runs_ends_with_an_error_event_and_its_report_names_who_cancelled_it(
    tmp_path: Path,
) -> None:
    async with ticketed_runner(tmp_path, counting_model(tokens_per_second=20, answer_tokens=0)) as stage:
        ticket = stage.ticket()
        async with stage.post(ticket, body=chat(stream=True, max_tokens=5000)) as response:
            await response.content.readline()
            assert await stage.cancel(ticket) == "CANCELLED"
            rest = (await response.text()).splitlines()
        (report,) = await stage.router.until(1)
        assert await stage.cancel(ticket) == "ENDED"
    last = json.loads([line for line in rest if line.startswith("data: ")][-1][6:])
    assert (last["error"]["code"], last["error"]["message"]) == ("cancelled", "the request was cancelled by key:ops")
    receipt = report.receipt
    assert (receipt.outcome, receipt.cancelled_by) == (receipt_pb2.OUTCOME_CANCELLED, "key:ops")


async def test_an_answer_in_one_piece_is_cancelled_before_it_is_sent(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path, counting_model(prefill_seconds=30)) as stage:
        ticket = stage.ticket()
        asking = asyncio.ensure_future(stage.post(ticket).__aenter__())
        await until(lambda: stage.runner.service.holders_of("m") == 1)
        assert await stage.cancel(ticket) == "CANCELLED"
        response = await asking
        assert (response.status, response.headers["x-weft-reason"]) == (499, "CANCELLED")
        (report,) = await stage.router.until(1)
    assert (report.receipt.reason, report.receipt.cancelled_by) == (Reason.CANCELLED.value, "key:ops")


async def test_a_ticket_that_was_not_used_is_void_and_its_request_is_not_served_when_it_comes(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        ticket = stage.ticket()
        assert [await stage.cancel(ticket), await stage.cancel(ticket)] == ["VOIDED", "VOIDED"]
        async with stage.post(ticket) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (499, "cancelled")
        # The negative control: another ticket is good.
        async with stage.post(stage.ticket()) as response:
            assert response.status == 200
            await response.read()
        assert stage.served() == 1.0


async def test_a_voided_ticket_admits_nothing_while_the_request_of_a_used_one_goes_on(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path, counting_model(tokens_per_second=20, answer_tokens=0)) as stage:
        unused, used = stage.ticket(), stage.ticket()
        assert await stage.void(unused)
        async with stage.post(unused) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (499, "cancelled")
        async with stage.post(used, body=chat(stream=True, max_tokens=10)) as response:
            await response.content.readline()
            assert not await stage.void(used)
            assert (await response.text()).rstrip().endswith("data: [DONE]")
        assert not await stage.void(used), "nor once it has ended"


async def test_a_ticket_that_is_not_signed_for_the_runner_cancels_nothing(tmp_path: Path) -> None:
    async with ticketed_runner(tmp_path) as stage:
        assert await stage.cancel(stage.ticket(key=b"x" * 32)) == "TICKET_INVALID"
        assert await stage.cancel(stage.ticket(runner="r2")) == "TICKET_INVALID"
        assert await stage.cancel(stage.ticket(), "x" * 300) == "INVALID_ARGUMENT"
        assert await stage.cancel(stage.ticket(seconds=-1.0)) == "VOIDED", "one that has expired admits nothing anyway"
