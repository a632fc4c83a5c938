"""`/v1/batches` with OpenAI's client: valid and invalid requests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from batch_stage import BODY, Stage, jsonl, line, stage
from file_script import HELLO, NOW, MemoryBatches, MemoryFiles
from gateway_script import serving

from gateway.gateway_config import GatewayConfig, RateLimitConfig
from weft.api.common.v1 import embedding_pb2
from weft.api.router.v1 import batch_service_pb2, task_pb2
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.units import Rate


async def test_lines_become_the_tasks_their_route_would_create() -> None:
    taken: list[batch_service_pb2.BatchLine] = []

    class Noting(MemoryBatches):
        async def create(self, new: batch_service_pb2.Batch, lines: Any, **more: Any) -> batch_service_pb2.Batch:
            async def noted() -> AsyncGenerator[batch_service_pb2.BatchLine]:
                async for each in lines:
                    taken.append(each)
                    yield each

            return await super().create(new, noted(), **more)

    body = BODY | {"stream": True, "max_tokens": 5}
    lines = (b"\xef\xbb\xbf" + jsonl(line("one")), b"\r\n  \n", jsonl(line("two", body=body)).rstrip())
    async with stage(batches=Noting()) as at:
        made = await at.make(*lines)
    assert made["request_counts"]["total"] == 2
    assert [each.custom_id for each in taken] == ["one", "two"]
    first, second = (each.spec for each in taken)
    assert (first.model, first.origin_kind, first.chat.messages[0].content[0].text) == ("tiny", "chat", "hi")
    assert second.chat.sampling.max_tokens == 5
    assert json.loads(second.origin) == body


async def test_other_surfaces_support_batches() -> None:
    vector = task_pb2.TaskOutput(embeddings=[embedding_pb2.Embedding(values=[0.5, 0.25])])
    vector.events.extend(HELLO[0].events[-1:])
    cases: list[tuple[str, dict[str, object], task_pb2.TaskOutput, str]] = [
        ("/v1/embeddings", {"model": "tiny", "input": "hi"}, vector, "list"),
        ("/v1/completions", {"model": "tiny", "prompt": "hi"}, HELLO[0], "text_completion"),
        ("/v1/responses", {"model": "tiny", "input": "hi"}, HELLO[0], "response"),
    ]
    for endpoint, body, output, kind in cases:
        async with stage() as at:
            made = await at.make(line(url=endpoint, body=body), endpoint=endpoint)
            at.batches.end(made["id"], 0, outputs=(output,))
            at.batches.close(made["id"])
            done = await at.until(made["id"], "completed")
            (found,) = at.lines_of(done["output_file_id"])
            assert found["response"]["body"]["object"] == kind


async def test_invalid_field_is_reported() -> None:
    async with stage() as at:
        for fields, param in (
            ({"endpoint": None}, "endpoint"),
            ({"window_seconds": 59}, "window_seconds"),
            ({"window_seconds": 604_801}, "window_seconds"),
            ({"window_seconds": "3600"}, "window_seconds"),
            ({"input_file_id": ""}, "input_file_id"),
            ({"input_file_id": 7}, "input_file_id"),
            ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
            ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ):
            asked: dict[str, Any] = {"input_file_id": await at.file(line()), **fields}
            status, answer = await at.ask(**asked)
            assert (status, answer["error"]["param"]) == (400, param)
            assert at.batches.news == []


async def test_unknown_members_of_a_batch_and_its_lines_are_named_in_the_answer() -> None:
    async with stage() as at:
        file = await at.file(line("a", zz_line=1), line("b", zz_line=2))
        status, answer = await at.ask(input_file_id=file, zz_batch=1)
    assert status == 200
    assert [each["field"] for each in answer["warnings"]] == ["zz_batch", "zz_line"]
    assert "line 1" in answer["warnings"][1]["message"]


async def test_input_must_be_a_batch_file_of_the_same_tenant() -> None:
    async with stage() as at:
        missing, told = await at.ask(input_file_id="file-9")
        strange, _ = await at.ask(input_file_id=await at.file(line(), tenant="other"))
        status, answer = await at.ask(input_file_id=await at.file(line(), purpose="batch_output"))
    assert (missing, strange) == (404, 404)
    assert told["error"]["param"] == "input_file_id"
    assert "file-9" in told["error"]["message"]
    assert (status, answer["error"]["param"]) == (400, "input_file_id")


WRONG_LINES = [
    (b"{\n", "invalid_json_line", None),
    (b"[]\n", "invalid_json_line", None),
    (b'{"custom_id": "b", "custom_id": "c"}\n', "invalid_json_line", None),
    (b"\xff\xfe\n", "invalid_json_line", None),
    (b"[" * 1400 + b"\n", "invalid_json_line", None),
    (
        jsonl({key: value for key, value in line("b").items() if key != "custom_id"}),
        "missing_required_parameter",
        "custom_id",
    ),
    (jsonl(line("a")), "duplicate_custom_id", "custom_id"),
    (jsonl(line("")), "invalid_custom_id", "custom_id"),
    (jsonl(line("x" * 257)), "invalid_custom_id", "custom_id"),
    (jsonl(line("a\x00b")), "invalid_custom_id", "custom_id"),
    (jsonl(line("b") | {"custom_id": 7}), "invalid_type", "custom_id"),
    (jsonl(line("b", method="GET")), "invalid_method", "method"),
    (jsonl(line("b", url="/v1/embeddings")), "invalid_url", "url"),
    (jsonl({key: value for key, value in line("b").items() if key != "body"}), "missing_required_parameter", "body"),
    (jsonl(line("b", body=[])), "malformed_request", "body"),
    (jsonl(line("b", body={"messages": []})), "invalid_argument", "body.model"),
    (jsonl(line("b", body=BODY | {"temperature": 9})), "invalid_argument", "body.temperature"),
    (jsonl(line("b", body=BODY | {"n": 99})), "invalid_argument", "body.n"),
    (jsonl(line("b", body=BODY | {"user": "x" * 2000})), "line_too_long", None),
]


async def test_invalid_line_is_reported_with_its_number_and_nothing_starts() -> None:
    async with stage(max_line_bytes=1500) as at:
        for wrong, code, field in WRONG_LINES:
            made = await at.make(line("a"), b"\n", wrong, line("z"))
            assert (await at.get(made["id"]))["errors"] == made["errors"]
            assert at.batches.kept[made["id"]].results == []
            (error,) = made["errors"]["data"]
            assert (error["code"], error["line"], error["param"]) == (code, 3, field)
            assert made["errors"]["object"] == "list"
            assert made["status"] == "failed"
            assert made["failed_at"] == int(NOW.timestamp())
            assert made["in_progress_at"] is None
            assert error["message"]


async def test_at_most_100_line_errors_are_reported() -> None:
    async with stage() as at:
        some = await at.make(line("a"), line("a", method="GET", url="x"), b"{\n", line("a"))
        many = await at.make(*[b"{\n"] * 500)
    told = [(error["line"], error["code"]) for error in some["errors"]["data"]]
    assert told == [
        (2, "duplicate_custom_id"),
        (2, "invalid_method"),
        (2, "invalid_url"),
        (3, "invalid_json_line"),
        (4, "duplicate_custom_id"),
    ]
    assert [error["line"] for error in many["errors"]["data"]] == list(range(1, 101))


@pytest.mark.parametrize("content", [b"\n \r\n\n", b"\xef\xbb\xbf"])
async def test_file_without_requests_is_invalid(content: bytes) -> None:
    async with stage() as at:
        made = await at.make(content)
    (error,) = made["errors"]["data"]
    assert (made["status"], error["code"], error["line"]) == ("failed", "empty_file", None)


async def test_file_with_too_many_requests_is_invalid_at_the_first_excess_line() -> None:
    async with stage(max_lines=2) as at:
        fitting = await at.make(line("a"), line("b"), b"\n")
        made = await at.make(line("a"), line("b"), line("c"), line("d"))
    assert fitting["status"] == "in_progress"
    (error,) = made["errors"]["data"]
    assert (error["code"], error["line"]) == ("too_many_tasks", 3)


async def test_store_error_about_a_line_is_reported_for_that_line() -> None:
    refusal = invalid_field("lines[1].spec.origin", "is longer than 10 bytes")
    async with stage(batches=MemoryBatches(line_failure=refusal)) as at:
        made = await at.make(line("a"), b"\n\n", line("b"))
        at.batches.line_failure = WeftError(Reason.TOO_MANY_RESOURCES, "enough batches")
        status, answer = await at.ask(input_file_id=await at.file(line()))
    (error,) = made["errors"]["data"]
    assert (error["line"], error["code"], error["param"]) == (4, "invalid_argument", "spec.origin")
    assert error["message"] == "spec.origin: is longer than 10 bytes"
    assert (status, answer["error"]["code"]) == (429, "too_many_resources")


async def test_error_about_a_line_from_a_router_of_another_process_is_reported_for_that_line() -> None:
    """gRPC restores a FieldError for INVALID_ARGUMENT only."""
    field = "lines[1].spec.model"
    unknown = WeftError(Reason.MODEL_NOT_FOUND, f"{field}: there is no model b", metadata={"field": field})
    async with stage(batches=MemoryBatches(line_failure=unknown)) as at:
        made = await at.make(line("a"), line("b"))
    (error,) = made["errors"]["data"]
    assert (made["status"], error["line"], error["code"], error["message"]) == (
        "failed",
        2,
        "model_not_found",
        "spec.model: there is no model b",
    )


async def test_image_url_that_needs_fetching_is_invalid() -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
    body = BODY | {"messages": [{"role": "user", "content": content}]}
    async with stage() as at:
        made = await at.make(line("a", body=body))
    (error,) = made["errors"]["data"]
    assert error["param"] == "body.messages[0].content[0].image_url.url"


async def test_batch_counts_as_one_request_of_its_tenant() -> None:
    config = GatewayConfig(port=0, rate_limits=RateLimitConfig(default=Rate(1, 60)))
    files, batches = MemoryFiles(), MemoryBatches()
    async with serving(files=files, batches=batches, config=config) as gateway:
        at = Stage(gateway, files, batches)
        await at.make(*(line(str(number)) for number in range(5)))
        status, answer = await at.ask(input_file_id=await at.file(line()))
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_concurrent_batch_creations_are_limited() -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryBatches):
        async def create(self, new: batch_service_pb2.Batch, lines: Any, **more: Any) -> batch_service_pb2.Batch:
            entered.set()
            await go_on.wait()
            return await super().create(new, lines, **more)

    async with stage(batches=Slow(), max_creations=1) as at:
        making = asyncio.create_task(at.make(line()))
        await entered.wait()
        status, answer = await at.ask(input_file_id=await at.file(line()))
        go_on.set()
        assert (await making)["status"] == "in_progress"
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "max_creations" in answer["error"]["message"]
