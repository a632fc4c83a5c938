"""The endpoint picker as a proxy sees it: routes, refusals, and what goes to a gateway."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from picker_stage import BODY, LIMITED_HEADERS, PickerStage, fleet_view, grant, limited, log_entry, picker_stage

from gateway.config import ConnectionLimits, GatewayConfig
from gateway.picker.limits import PickerLimits
from gateway.picker.servicer import _Stream
from gateway.picker.session import Route, metadata_text
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.dispatch.placement import WaitingInQueue
from weft.dispatch.tickets import tickets_in
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import ANSWER_NAMESPACE, DESTINATION, DESTINATION_NAMESPACE, PLACED
from weft.kernel.reasons import Reason

GATEWAY = "127.0.0.1:8080"


def headers_set(answer: pb.ProcessingResponse) -> dict[str, str]:
    kind = answer.WhichOneof("response")
    mutation = (
        answer.immediate_response.headers
        if kind == "immediate_response"
        else answer.request_headers.response.header_mutation
    )
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def refusal(answers: list[pb.ProcessingResponse]) -> tuple[int, dict[str, Any], dict[str, str]]:
    (answer,) = answers
    immediate = answer.immediate_response
    return immediate.status.code, json.loads(immediate.body), headers_set(answer)


def body_of(answers: list[pb.ProcessingResponse]) -> bytes:
    return b"".join(each.request_body.response.body_mutation.streamed_response.body for each in answers[1:])


async def test_a_request_goes_to_the_runner_of_its_grant_with_a_ticket_and_without_the_callers_key(
    tmp_path: Path,
) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        answers = await stage.ask(authorization="Bearer secret", x_session_id="s", x_priority="low")
        found = headers_set(answers[0])
        assert found[DESTINATION] == "10.0.0.1:8081"
        assert [each.mac for each in tickets_in(found["x-weft-ticket"])] == [b"mac"]
        assert found["x-request-id"] == "req-1"
        assert found["x-envoy-max-retries"] == "0"
        assert 599_000 < int(found["x-envoy-upstream-rq-timeout-ms"]) <= 600_000
        removed = answers[0].request_headers.response.header_mutation.remove_headers
        assert set(removed) == {"authorization", "x-api-key"}
        known = answers[0].dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
        assert metadata_text(known, DESTINATION) == "10.0.0.1:8081"
        assert metadata_text(known, PLACED) == "tiny on r1"
        assert body_of(answers) == BODY
        (placed,) = stage.scheduler.placed
        assert (placed.model, placed.priority.name, placed.report_to) == ("tiny", "LOW", "router-1")
        assert placed.affinity_key


async def test_each_fallback_has_a_ticket_of_its_own_in_the_order_of_the_endpoints(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant(1, "r1", grant(2, "r2")))
        answers = await stage.ask()
        found = headers_set(answers[0])
        assert found[DESTINATION] == "10.0.0.1:8081,10.0.0.2:8081"
        assert len(tickets_in(found["x-weft-ticket"])) == 2
        assert found["x-envoy-max-retries"] == "1"
        assert stage.scheduler.placed[0].fallbacks == PickerLimits().fallbacks


async def test_what_a_caller_may_still_ask_for_is_left_to_the_proxy_which_adds_it_to_the_answer(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(replace(grant(), rate_limits=limited()))
        stage.scheduler.script.put_nowait(grant())
        answers = await stage.ask()
        told = answers[0].dynamic_metadata.fields[ANSWER_NAMESPACE].struct_value
        assert {name: metadata_text(told, name) for name in told.fields} == LIMITED_HEADERS
        assert ANSWER_NAMESPACE not in (await stage.ask())[0].dynamic_metadata.fields, "nothing limits this one"


async def test_a_request_waits_without_an_answer_until_there_is_a_slot(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage, stage.asking() as call:
        stage.scheduler.script.put_nowait(WaitingInQueue(position=1, reason="every slot is taken"))
        answer = asyncio.ensure_future(call.read())
        await asyncio.sleep(0.05)
        assert not answer.done()
        stage.scheduler.script.put_nowait(grant())
        assert headers_set(await asyncio.wait_for(answer, 5.0))[DESTINATION] == "10.0.0.1:8081"


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_body_that_never_ends_is_refused_whichever_server_reads_it(tmp_path: Path, *, is_local: bool) -> None:
    """The picker kept what had come of such a body for as long as its caller kept the connection."""
    config = GatewayConfig(connections=ConnectionLimits(body_grace_seconds=0.02))
    async with picker_stage(tmp_path, config=config, is_local=is_local) as stage:
        async with stage.asking(BODY[:-1], is_whole=False) as call:
            status, error, headers = refusal([await call.read()])
            assert await call.read() is grpc.aio.EOF
        assert (status, error["error"]["code"], headers["x-weft-reason"]) == (
            408,
            "deadline_exceeded",
            "DEADLINE_EXCEEDED",
        )
        assert await stage.figure('weft_picker_requests_total{result="deadline_exceeded"') == 1
        assert stage.scheduler.placed == []


@pytest.mark.parametrize("way", ["reset", "half closed"])
async def test_a_caller_that_leaves_while_its_request_waits_ends_it(tmp_path: Path, way: str) -> None:
    async with picker_stage(tmp_path) as stage, stage.asking() as call:
        stage.scheduler.script.put_nowait(WaitingInQueue(position=1, reason="every slot is taken"))
        await asyncio.wait_for(stage.scheduler.waited_for.wait(), 5.0)
        if way == "reset":
            call.cancel()
        else:
            await call.done_writing()
        reason, receipt = await stage.end()
        assert reason is Reason.CANCELLED
        assert not receipt.attempts


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "malformed_request"),
        (b'{"model":"tiny"}', {}, 400, "invalid_argument"),
        (BODY, {"content_type": "text/plain"}, 400, "malformed_request"),
        (BODY, {"x_priority": "huge"}, 400, "invalid_argument"),
        (BODY, {":authority": "evil.example"}, 403, "permission_denied"),
    ],
)
async def test_what_a_gateway_refuses_is_refused_with_its_envelope(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with picker_stage(tmp_path) as stage:
        found, document, set_headers = refusal(await stage.ask(body, **headers))
        assert (found, document["error"]["code"]) == (status, code)
        assert document["request_id"] == set_headers["x-request-id"] == "req-1"
        assert set_headers["content-type"] == "application/json"
        assert not stage.scheduler.placed


async def test_a_refusal_of_the_scheduler_says_when_to_try_again(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(WeftError(Reason.QUEUE_FULL, "16 requests wait", retry_after_seconds=7))
        status, document, headers = refusal(await stage.ask())
        assert (status, document["error"]["code"], headers["retry-after"]) == (503, "queue_full", "7")
        assert headers["x-weft-reason"] == "QUEUE_FULL"
        reason, receipt = await stage.end()
        assert (reason, len(receipt.attempts)) == (Reason.QUEUE_FULL, 0)


async def test_a_body_above_the_limit_is_refused_before_it_has_arrived(tmp_path: Path) -> None:
    async with picker_stage(tmp_path, config=GatewayConfig(max_body_bytes=1024)) as stage:
        status, document, _ = refusal(await stage.ask(b"x" * 2000))
        assert (status, document["error"]["code"]) == (413, "request_too_large")


async def test_one_more_than_the_open_requests_is_refused(tmp_path: Path) -> None:
    async with picker_stage(tmp_path, limits=PickerLimits(max_open_requests=1)) as stage:
        stage.scheduler.script.put_nowait(grant())
        await stage.ask()
        status, document, _ = refusal(await stage.ask(x_request_id="req-2"))
        assert (status, document["error"]["code"]) == (429, "too_many_resources")


async def test_an_id_that_is_in_use_is_replaced_since_witnesses_name_requests_by_it(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        stage.scheduler.script.put_nowait(grant())
        await stage.ask()
        second = headers_set((await stage.ask())[0])["x-request-id"]
        assert second != "req-1"
        await stage.log(log_entry(request_id=second, usage=(1, 1)))
        await stage.clock.advance(5.0)
        _, receipt = await stage.end()
        assert receipt.request_id == second


@pytest.mark.parametrize(
    ("path", "fields", "headers"),
    [
        ("/v1/responses", {}, {}),
        ("/v1/chat/completions", {"model": "agent/helper"}, {}),
        ("/v1/chat/completions", {"durable": "wait"}, {}),
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_weft_events": True}}, {}),
        ("/v1/chat/completions", {}, {"origin": "http://localhost:3000"}),
    ],
)
async def test_what_the_lane_cannot_do_goes_to_the_gateway_as_it_came(
    tmp_path: Path, path: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    body = json.dumps({**json.loads(BODY), **fields}).encode()
    async with picker_stage(tmp_path, gateway=GATEWAY) as stage:
        answers = await stage.ask(body, path, authorization="Bearer key", **headers)
        assert headers_set(answers[0]) == {DESTINATION: GATEWAY}
        assert "authorization" not in answers[0].request_headers.response.header_mutation.remove_headers
        assert body_of(answers) == body
        assert not stage.scheduler.placed


async def test_a_model_whose_runner_no_proxy_reaches_is_served_by_the_gateway(tmp_path: Path) -> None:
    async with picker_stage(tmp_path, view=fleet_view(("http://10.0.0.1:8081", "")), gateway=GATEWAY) as stage:
        assert headers_set((await stage.ask())[0]) == {DESTINATION: GATEWAY}


async def test_without_a_gateway_what_needs_one_is_refused(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        status, document, _ = refusal(await stage.ask(path="/v1/responses"))
        assert (status, document["error"]["code"]) == (404, "not_found")
        body = json.dumps({**json.loads(BODY), "durable": "wait"}).encode()
        status, document, _ = refusal(await stage.ask(body))
        assert (status, document["error"]["code"]) == (501, "unsupported_operation")


async def test_a_runner_without_an_address_fails_its_attempt_and_the_next_grant_is_used(tmp_path: Path) -> None:
    async with picker_stage(tmp_path, view=fleet_view(("", "http://10.0.0.2:8081"))) as stage:
        stage.scheduler.script.put_nowait(grant(1, "r1"))
        stage.scheduler.script.put_nowait(grant(2, "r2"))
        assert headers_set((await stage.ask())[0])[DESTINATION] == "10.0.0.2:8081"
        assert stage.scheduler.failed == [(1, Reason.TOOL_UNAVAILABLE)]


async def test_a_large_body_passes_unchanged(tmp_path: Path) -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * 1_200_000}]}).encode()
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        assert body_of(await stage.ask(body)) == body


async def test_a_request_counts_whose_proxy_ends_the_stream_as_soon_as_it_has_the_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = _Stream.route

    async def send_and_end(stream: _Stream, route: Route) -> None:
        await send(stream, route)
        # As when the end of the stream overtakes the return of the last write.
        raise asyncio.CancelledError

    monkeypatch.setattr(_Stream, "route", send_and_end)
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(grant())
        async with stage.asking() as call:
            await call.read()
            assert await stage.figure('weft_picker_requests_total{result="lane"') == 1.0


async def test_unforeseen_faults_are_answered_and_cost_one_request(tmp_path: Path) -> None:
    async with picker_stage(tmp_path) as stage:
        stage.scheduler.script.put_nowait(RuntimeError("unforeseen"))  # type: ignore[arg-type]
        status, document, _ = refusal(await stage.ask())
        assert (status, document["error"]["code"]) == (500, "internal")
        assert await _is_served(stage)


async def _is_served(stage: PickerStage) -> bool:
    stage.scheduler.script.put_nowait(grant())
    return DESTINATION in headers_set((await stage.ask(x_request_id="req-9"))[0])
