"""Requests that a real Envoy carries past the gateway: a real mesh, fake engines, and what the receipts say."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from lane_mesh import CHAT, SECONDS, engine_lane_runner, lane_runner, running_lane
from mesh_process import own_descendants


async def test_a_unary_answer_and_a_stream_have_a_receipt_of_both_witnesses(tmp_path: Path) -> None:
    async with running_lane(tmp_path, lane_runner("a", echo=True)) as lane:
        unary, streamed = lane.new_id(), lane.new_id()
        status, answer, _ = await lane.ask(lane.body("hello lane"), unary)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello lane")
        text, is_whole = await lane.stream_text(
            lane.body("one two three", stream_options={"include_usage": True}), streamed
        )
        assert (text, is_whole) == ("one two three", True)
        for request_id in (unary, streamed):
            receipt = (await lane.record(request_id))["receipt"]
            assert receipt["outcome"] == "completed", receipt
            assert receipt["attempts"][0]["runner"] == "a"
            assert receipt["proxy"]["status"] == 200
            assert "disagreements" not in receipt["proxy"] or not receipt["proxy"]["disagreements"]
            assert receipt["completionTokens"] > 0
        assert await lane.figure("weft_truth_disagreements_total") == 0
        assert await lane.figure("weft_picker_open_requests") == 0


async def test_no_stream_loses_its_first_token(tmp_path: Path) -> None:
    # With the queue's 16 places one more than streams: the request that tried the lane may still hold its slot.
    async with running_lane(tmp_path, lane_runner("a", slots=9, answer_tokens=40)) as lane:
        bodies = [lane.stream_text(lane.body(), lane.new_id()) for _ in range(24)]
        answers = await asyncio.gather(*bodies)
        expected = answers[0][0]
        assert expected.startswith("tok0")
        assert answers == [(expected, True)] * 24


@pytest.mark.parametrize("kind", ["sidecar", "engine"])
async def test_a_dead_first_runner_is_an_attempt_and_the_second_one_answers(tmp_path: Path, kind: str) -> None:
    """The next of Envoy's list; or, as the slot of an engine is taken at its runner, the scheduler's next choice."""
    runners = [lane_runner(name) for name in "ab"]
    for each in runners:
        each["models"][0]["lane"] = kind
    async with running_lane(tmp_path, *runners) as lane:
        (dead,) = [each for each in own_descendants(lane.mesh.family()[0]) if _is_runner(each, "a")]
        dead.kill()
        # As many as the other runner has slots: none is kept for fallbacks.
        ids = [lane.new_id() for _ in range(4)]
        answers = await asyncio.gather(*(lane.ask(lane.body(), each) for each in ids))
        assert [status for status, _, _ in answers] == [200] * 4
        receipts = [(await lane.record(each))["receipt"] for each in ids]
        assert {each["outcome"] for each in receipts} == {"completed"}
        tried = [each["attempts"] for each in receipts]
        assert any([each["runner"] for each in attempts] == ["a", "b"] for attempts in tried), tried


def _is_runner(process: Any, name: str) -> bool:
    line = process.cmdline()
    return "--runner" in line and line[line.index("--runner") + 1] == name


async def test_an_engine_that_dies_in_mid_stream_ends_as_an_error_and_so_does_the_receipt(tmp_path: Path) -> None:
    runner = lane_runner("a", answer_tokens=0, tokens_per_second=50.0)
    async with running_lane(tmp_path, runner) as lane:
        backend = await lane.mesh.backend("a")
        await backend.set_behaviour(answer_tokens=0, tokens_per_second=50.0, crash_after_tokens=5)
        request_id = lane.new_id()
        text, is_whole = await lane.stream_text(lane.body(max_tokens=500), request_id)
        assert text.startswith("tok0")
        assert not is_whole
        receipt = (await lane.record(request_id))["receipt"]
        assert receipt["outcome"] == "failed", receipt
        await backend.close()


async def test_a_request_that_a_runner_answers_is_cancelled_there_by_its_id(tmp_path: Path) -> None:
    async with running_lane(tmp_path, lane_runner("a", slots=1, tokens_per_second=20.0, answer_tokens=0)) as lane:
        request_id = lane.new_id()
        async with lane.asking(lane.body(stream=True, max_tokens=5000), request_id) as response:
            await response.content.readline()
            status, record = await lane.cancel(request_id)
            assert (status, record["state"], record["reason"]) == (200, "ended", "cancelled"), record
            text = await asyncio.wait_for(response.text(), SECONDS)
        last = json.loads([line for line in text.splitlines() if line.startswith("data: ")][-1][6:])
        assert last["error"]["code"] == "cancelled"
        receipt = (await lane.record(request_id))["receipt"]
        assert (receipt["outcome"], receipt["cancelledBy"]) == ("cancelled", record["cancelledBy"])
        assert receipt["proxy"]["disagreements"] == []
        # The engine is free for the next one.
        assert (await lane.ask(lane.body(max_tokens=1), lane.new_id()))[0] == 200


async def test_a_request_that_an_engine_answers_itself_goes_on_and_its_cancellation_says_so(tmp_path: Path) -> None:
    async with running_lane(tmp_path, engine_lane_runner("a", tokens_per_second=50.0, answer_tokens=60)) as lane:
        request_id = lane.new_id()
        async with lane.asking(lane.body(stream=True), request_id) as response:
            await response.content.readline()
            status, refused = await lane.cancel(request_id)
            assert (status, refused["error"]["code"]) == (501, "unsupported_operation"), refused
            assert "closing the connection" in refused["error"]["message"]
            assert "data: [DONE]" in await asyncio.wait_for(response.text(), SECONDS)
        receipt = (await lane.record(request_id))["receipt"]
        assert receipt["outcome"] == "completed", receipt
        assert "cancelledBy" not in receipt


async def test_refusals_are_the_mesh_s_own(tmp_path: Path) -> None:
    sections = {"router": {"rate_limits": {"default": ["3req/min"]}}}
    async with running_lane(tmp_path, lane_runner("a"), **sections) as lane:
        status, answer, _ = await lane.ask(lane.body() | {"model": "nothing"}, lane.new_id())
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        answers = [await lane.ask(lane.body(), lane.new_id()) for _ in range(4)]
        served = [headers for status, _, headers in answers if status == 200]
        assert served
        assert all(headers["x-ratelimit-limit-requests"] == "3" for headers in served)
        assert served[0]["x-ratelimit-remaining-requests"] in ("0", "1", "2")
        status, answer, headers = answers[-1]
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["retry-after"]) >= 1
        assert headers["x-ratelimit-limit-requests"] == "3"


async def test_a_full_queue_is_a_503_with_retry_after(tmp_path: Path) -> None:
    sections = {"router": {"queue_depth_per_runner": 1}}
    runner = lane_runner("a", slots=1, tokens_per_second=5.0, answer_tokens=200)
    async with running_lane(tmp_path, runner, **sections) as lane:
        async with lane.asking(lane.body(stream=True, max_tokens=200), lane.new_id()) as first:
            await first.content.readline()
            waiting = asyncio.ensure_future(lane.ask(lane.body(max_tokens=1), lane.new_id()))
            await asyncio.sleep(0.5)
            status, answer, headers = await lane.ask(lane.body(max_tokens=1), lane.new_id())
            assert (status, answer["error"]["code"]) == (503, "queue_full")
            assert int(headers["retry-after"]) >= 1
            first.close()
        status, _, _ = await asyncio.wait_for(waiting, SECONDS)
        assert status == 200


async def test_bodies_of_1_and_20_mb_reach_the_engine_and_have_receipts_and_a_larger_one_is_refused(
    tmp_path: Path,
) -> None:
    runner = lane_runner("a", slots=1, answer_tokens=2)
    runner["models"][0]["context_tokens"] = 8_000_000
    async with running_lane(tmp_path, runner, gateway={"max_body_bytes": 33_554_432}) as lane:
        used: list[int] = []
        for size in (1_200_000, 20_000_000):
            name = lane.new_id()
            # Cut off anywhere it would be no JSON; its end counts, too.
            status, text = await lane.ask_in_pieces(lane.body("x" * size + " one two" * (len(used) + 1)), name)
            assert status == 200, text
            receipt = (await lane.record(name))["receipt"]
            assert (receipt["outcome"], receipt["attempts"][0]["runner"]) == ("completed", "a"), receipt
            assert (receipt["proxy"]["status"], receipt["proxy"]["disagreements"]) == (200, [])
            used.append(receipt["promptTokens"])
        assert used[1] == used[0] + 2
        status, text = await lane.ask_in_pieces(lane.body("x" * 34_000_000), lane.new_id())
        assert status == 413, text


async def test_a_body_that_stops_coming_is_refused_through_the_proxy(tmp_path: Path) -> None:
    """Envoy waits for it without a limit, as an answer may take its time."""
    limits = {"connections": {"body_grace_seconds": 0.3}}
    async with running_lane(tmp_path, lane_runner("a"), gateway=limits) as lane:
        host, _, port = lane.url.removeprefix("http://").rpartition(":")
        body = json.dumps(lane.body()).encode()
        for sent in (body, body[:-1]):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + sent)
            answer = await asyncio.wait_for(reader.read(), SECONDS)
            writer.close()
            if sent == body:
                assert answer.startswith(b"HTTP/1.1 200 "), answer
            else:
                assert answer.startswith(b"HTTP/1.1 408 "), answer
                assert b"more slowly than 1024 bytes per second" in answer
        assert await lane.figure('weft_picker_requests_total{result="deadline_exceeded"') == 1


async def test_what_the_lane_cannot_do_is_answered_by_the_gateway(tmp_path: Path) -> None:
    async with running_lane(tmp_path, lane_runner("a")) as lane:
        before = await lane.figure("weft_gateway_requests_total")
        async with lane.http.get(f"{lane.url}/v1/models") as response:
            assert response.status == 200
        request_id = lane.new_id()
        status, _, headers = await lane.ask(lane.body(durable="wait"), request_id)
        assert status == 200
        assert headers["x-weft-task-id"]
        assert await lane.figure("weft_gateway_requests_total") >= before + 2


async def test_an_engine_that_the_proxy_calls_itself_answers_and_its_log_is_the_receipt(tmp_path: Path) -> None:
    async with running_lane(tmp_path, engine_lane_runner("a", echo=True)) as lane:
        unary, streamed = lane.new_id(), lane.new_id()
        status, answer, _ = await lane.ask(lane.body("hello engine", x_client_id="c"), unary)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello engine")
        assert await lane.stream_text(lane.body("one two"), streamed) == ("one two", True)
        for request_id in (unary, streamed):
            receipt = (await lane.record(request_id))["receipt"]
            assert receipt["outcome"] == "completed", receipt
            assert receipt["completionTokens"] > 0
        assert await lane.figure('weft_picker_ends_total{witness="proxy"') >= 2


async def test_an_engine_that_the_proxy_calls_itself_and_that_dies_is_a_failed_request(tmp_path: Path) -> None:
    async with running_lane(tmp_path, engine_lane_runner("a", tokens_per_second=50.0)) as lane:
        backend = await lane.mesh.backend("a")
        await backend.set_behaviour(answer_tokens=0, tokens_per_second=50.0, crash_after_tokens=5)
        request_id = lane.new_id()
        text, is_whole = await lane.stream_text(lane.body(max_tokens=500), request_id)
        assert (text.startswith("tok0"), is_whole) == (True, False)
        receipt = (await lane.record(request_id))["receipt"]
        assert receipt["outcome"] == "failed", receipt
        assert receipt["proxy"]["flags"]
        await backend.close()


async def test_an_engine_that_is_dead_when_the_proxy_calls_it_is_an_honest_503_or_another_one_answers(
    tmp_path: Path,
) -> None:
    """Which of both, depends on whether its runner has noticed. It was said that the mesh cannot be reached."""
    async with running_lane(tmp_path, engine_lane_runner("a"), engine_lane_runner("b")) as lane:
        (runner,) = [each for each in own_descendants(lane.mesh.family()[0]) if _is_runner(each, "a")]
        (engine,) = [each for each in runner.children(recursive=True) if "weft_testing.fake_backend" in each.cmdline()]
        engine.kill()
        ids = [lane.new_id() for _ in range(4)]
        answers = await asyncio.gather(*(lane.ask(lane.body(), each) for each in ids))
        for request_id, (status, body, headers) in zip(ids, answers, strict=True):
            record = await lane.record(request_id)
            attempt = record["receipt"]["attempts"][-1]
            if status == 200:
                assert (record["receipt"]["outcome"], attempt["runner"]) == ("completed", "b"), record
                continue
            assert (status, headers["retry-after"], headers["x-request-id"]) == (503, "1", request_id)
            assert body["error"]["message"].startswith("the runner or engine"), body
            assert (record["receipt"]["outcome"], attempt["runner"]) == ("failed", "a"), record
            assert attempt["reason"] == record["reason"] in ("connect_failed", "worker_lost"), record


async def test_an_engine_that_the_proxy_calls_itself_and_that_dies_before_its_first_byte_is_a_503(
    tmp_path: Path,
) -> None:
    """Envoy has no second destination for it, though another runner is free."""
    async with running_lane(tmp_path, engine_lane_runner("a"), engine_lane_runner("b")) as lane:
        backend = await lane.mesh.backend("a")
        await backend.set_behaviour(crash_after_tokens=0)
        status, name = await lane.placed_on("a", lane.body(max_tokens=4))
        assert status == 503
        record = await lane.record(name)
        (attempt,) = record["receipt"]["attempts"]
        assert (record["receipt"]["outcome"], attempt["reason"]) == ("failed", record["reason"]), record
        # The caller asks again.
        assert (await lane.ask(lane.body(max_tokens=4), lane.new_id()))[0] == 200
        await backend.close()


async def test_bytes_that_end_cleanly_in_mid_answer_are_a_cut_off_answer_though_the_proxy_saw_no_fault(
    tmp_path: Path,
) -> None:
    async with running_lane(tmp_path, engine_lane_runner("a", end_without_finish_reason=True)) as lane:
        request_id = lane.new_id()
        _, is_whole = await lane.stream_text(lane.body(), request_id)
        assert is_whole, "the caller's transfer ends as that of a whole answer"
        receipt = (await lane.record(request_id))["receipt"]
        assert (receipt["outcome"], receipt["proxy"]["status"]) == ("failed", 200), receipt
        assert not receipt["proxy"]["flags"]
