"""The gateway and the lane side by side: every answer of one is that of the other, but for what the table names."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import bad_inputs_auth
import bad_inputs_chat
import bad_inputs_json
import bad_inputs_media
import bad_inputs_names
import bad_inputs_schema
import pytest
from bad_inputs_server import ForgetfulDispatcher
from bad_inputs_stage import ENDPOINTS, Case
from gateway_script import RawResponse, RunningGateway, ScriptedDispatcher, Step, delta, hello, started
from gateway_script import serving as serving_gateway
from picker_stage import LIMITED_HEADERS, limited
from test_aliases_http import fleet
from test_gateway_keys import Keys
from ways_in import LimitedDispatcher, RunningLane, serving_lane

from gateway.config import GatewayConfig
from weft.dispatch.dispatcher import placement_request
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_app.edge.lane import LANE_PATHS

ONLY_OF_THE_LANE = MappingProxyType({"x-weft-reason": "the proxy's log has the reason by it"})
"""Headers that answers of the lane have besides, and why."""
OF_EACH_ANSWER = frozenset({"date", "content-length"})
LANE_ENDPOINTS = tuple(each for each in ENDPOINTS if each.path in LANE_PATHS)
FAMILIES = {
    family.__name__.removeprefix("bad_inputs_"): family.CASES
    for family in (
        bad_inputs_json,
        bad_inputs_chat,
        bad_inputs_schema,
        bad_inputs_names,
        bad_inputs_media,
    )
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/embeddings": {"model": "tiny", "input": "hi"},
}
CHAT = BODIES["/v1/chat/completions"]


@asynccontextmanager
async def both(*scripts: ScriptedDispatcher, **parts: Any) -> AsyncIterator[tuple[RunningGateway, RunningLane]]:
    """The two ways, each with a dispatcher of its own."""
    first, second = scripts or (ForgetfulDispatcher(), ForgetfulDispatcher())
    async with serving_gateway(first, **parts) as gateway, serving_lane(second, **parts) as lane:
        yield gateway, lane


def with_id(raw: bytes, request_id: str) -> bytes:
    """The same request with an id of its own."""
    return raw.replace(b"\r\n", f"\r\nX-Request-Id: {request_id}\r\n".encode(), 1)


def shown(answer: RawResponse) -> tuple[int, dict[str, str], Any]:
    """What callers see of an answer that is the same for the same request."""
    try:
        body = json.loads(answer.body)
    except ValueError:
        body = answer.body
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in ("id", "created")}
    headers = {name: value for name, value in answer.headers.items() if name not in OF_EACH_ANSWER}
    return answer.status, headers, body


def differences(by_gateway: RawResponse, by_lane: RawResponse) -> list[str]:
    """Where two answers differ beyond the table."""
    status, headers, body = shown(by_gateway)
    its_status, its_headers, its_body = shown(by_lane)
    for name in ONLY_OF_THE_LANE:
        its_headers.pop(name, None)
    pairs = (("status", status, its_status), ("headers", headers, its_headers), ("body", body, its_body))
    return [f"{what}: {mine!r} and {its!r}" for what, mine, its in pairs if mine != its]


async def answer_of(way: RunningGateway, raw: bytes) -> RawResponse:
    """The answer to raw bytes; of a connection that is reset, what came before."""
    pieces = []
    async with way.connection() as (reader, writer):
        with suppress(ConnectionError):
            writer.write(raw)
            while piece := await reader.read(65_536):
                pieces.append(piece)
    return RawResponse.parse(b"".join(pieces))


async def compared(cases: tuple[Case, ...], gateway: RunningGateway, lane: RunningLane) -> list[str]:
    found, number = [], 0
    for case in cases:
        for endpoint in LANE_ENDPOINTS:
            if not case.applies(endpoint):
                continue
            number += 1
            raw = with_id(case.send(endpoint), f"r-{number}")
            answers = await answer_of(gateway, raw), await answer_of(lane, raw)
            found += [f"{case.name} at {endpoint}: {each}" for each in differences(*answers)]
    assert number
    return found


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_is_bad_has_the_same_answer_by_both_ways(family: str) -> None:
    async with both() as (gateway, lane):
        assert await compared(FAMILIES[family], gateway, lane) == []
        assert lane.proxy.asked, "the lane was not asked"


async def test_whoever_shows_no_good_key_is_refused_alike() -> None:
    async with both(keys=Keys()) as (gateway, lane):
        assert await compared(bad_inputs_auth.CASES, gateway, lane) == []
        assert lane.scheduler.placed == []


HEADS = [
    {"X-Tenant-ID": "a b"},
    {"X-Priority": "huge"},
    {"X-Session-Id": "x" * 300},
    {"X-Client-Id": "two words"},
    {"X-Request-Timeout-Seconds": "soon"},
    {"X-Request-Timeout-Seconds": "1e9"},
    {"X-Cache-Mode": "all"},
    {"X-Cache-Tag": "x" * 300},
    {"Host": "evil.example"},
    {"Content-Type": "text/plain"},
    {"X-Request-Id": "no token!"},
    {f"X-Filler-{number}": "x" for number in range(200)},
    {"X-Filler": "x" * 40_000},
    # And what is good.
    {"X-Tenant-ID": "ann", "X-Priority": "low", "X-Session-Id": "s", "X-Request-Timeout-Seconds": "5"},
]


def with_own_id(answer: RawResponse) -> RawResponse:
    """An answer without the id that its way has made for it."""
    body = re.sub(rb"req-[0-9a-f]{24}", b"own", answer.body)
    return replace(answer, headers={**answer.headers, "x-request-id": "own"}, body=body)


@pytest.mark.parametrize("headers", HEADS, ids=lambda headers: next(iter(headers)))
async def test_a_head_has_the_same_answer_by_both_ways(headers: dict[str, str]) -> None:
    body = json.dumps(CHAT).encode()
    async with both() as ways:
        named = {"X-Request-Id": "r-1", **headers}
        answers = [await each.request("POST", LANE_PATHS[0], body, named) for each in ways]
    if "X-Request-Id" in headers or "X-Filler-0" in headers:
        # An id that is none, or that a parser did not read: each makes one of its own.
        assert all(answer.headers["x-request-id"].startswith("req-") for answer in answers)
        answers = [with_own_id(answer) for answer in answers]
    assert differences(*answers) == []


@pytest.mark.parametrize("size", [2_000, 900_000])
async def test_a_body_above_the_limit_has_the_same_answer_by_both_ways(size: int) -> None:
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * size}]}).encode()
    async with both(config=GatewayConfig(port=0, max_body_bytes=1_024)) as ways:
        closing = [each.post(LANE_PATHS[0], body).replace(b"\r\n", b"\r\nConnection: close\r\n", 1) for each in ways]
        answers = [await answer_of(each, raw) for each, raw in zip(ways, closing, strict=True)]
    assert [each.status for each in answers] == [413, 413]
    found = [json.loads(each.body)["error"] for each in answers]
    assert found[0]["code"] == found[1]["code"] == "request_too_large"


REFUSALS = [
    WeftError(Reason.QUEUE_FULL, "16 requests wait", retry_after_seconds=7, metadata={"queueDepth": "16"}),
    WeftError(Reason.QUEUE_TIMEOUT, "it waited too long", retry_after_seconds=1),
    WeftError(Reason.RATE_LIMIT_EXCEEDED, "Tenant a exceeded 3 req/min", retry_after_seconds=900),
    WeftError(Reason.MODEL_NOT_FOUND, "no model or pool is called 'nope'"),
    WeftError(Reason.NO_RUNNER_AVAILABLE, "no runner is there", retry_after_seconds=5),
    WeftError(Reason.DEADLINE_UNREACHABLE, "it would take 90 s", metadata={"estimate_seconds": "90"}),
    WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "9000 tokens do not fit"),
    # Of the runner, which would be the same on each.
    WeftError(Reason.BACKEND_REJECTED, "the engine takes no such grammar"),
    WeftError(Reason.TEMPLATE_FAILED, "the template has no tools"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: error.reason.name)
async def test_a_refusal_of_scheduler_or_engine_has_the_same_answer_by_both_ways(
    error: WeftError, stream: bool
) -> None:
    body = json.dumps({**CHAT, "stream": stream}).encode()
    async with both(ScriptedDispatcher([error]), ScriptedDispatcher([error])) as ways:
        answers = [await each.request("POST", LANE_PATHS[0], body, {"X-Request-Id": "r-1"}) for each in ways]
    assert differences(*answers) == []
    assert answers[0].status >= 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LANE_PATHS)
async def test_an_answer_says_what_its_caller_may_still_ask_for_by_both_ways(path: str, stream: bool) -> None:
    given = BODIES[path]
    if stream and path != "/v1/embeddings":
        given = {**given, "stream": True}
    script = ScriptedDispatcher(hello(), vectors=[[0.5]])
    async with (
        serving_gateway(LimitedDispatcher(script, limited())) as gateway,
        serving_lane(script, rate_limits=limited()) as lane,
    ):
        body = json.dumps(given).encode()
        answers = [await each.request("POST", path, body, {"X-Request-Id": "r-1"}) for each in (gateway, lane)]
        assert lane.proxy.carried == 1
    for answer in answers:
        assert answer.status == 200
        assert {name: text for name, text in answer.headers.items() if "ratelimit" in name} == LIMITED_HEADERS
    headers = [shown(answer)[1] for answer in answers]
    assert headers[0] == headers[1]


async def test_a_stream_that_fails_after_content_ends_alike_by_both_ways() -> None:
    steps: list[Step] = [[started()], [delta("Hel")], WeftError(Reason.SERVER_DIED, "the engine died")]
    body = json.dumps({**CHAT, "stream": True}).encode()
    async with both(ScriptedDispatcher(steps), ScriptedDispatcher(steps)) as ways:
        answers = [await each.request("POST", LANE_PATHS[0], body, {"X-Request-Id": "r-1"}) for each in ways]
    last = [[line for line in each.body.split(b"\n") if line.startswith(b"data: ")][-1] for each in answers]
    assert last[0] == last[1]
    assert json.loads(last[0][6:])["error"]["code"] == "server_died"


@pytest.mark.parametrize("path", LANE_PATHS)
async def test_a_caller_that_hangs_up_ends_its_request_by_both_ways(path: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    never = asyncio.Event()
    scripts = [ScriptedDispatcher([[started()], never], vectors=never) for _ in range(2)]
    async with both(*scripts) as ways:
        for each in ways:
            async with each.connection() as (_, writer):
                writer.write(each.post(path, body))
                await asyncio.wait_for(each.dispatcher.was_asked.wait(), 10)
            await asyncio.wait_for(each.dispatcher.was_closed.wait(), 10)


SAYINGS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "a tenant, a session and a priority": ({"X-Tenant-ID": "ann", "X-Session-Id": "s", "X-Priority": "low"}, {}),
    "the same in the body": ({}, {"prompt_cache_key": "s", "x_priority": "high", "x_client_id": "editor"}),
    "a cache tag": ({"X-Cache-Tag": "team", "X-Cache-Mode": "prefix"}, {}),
    "an alias": ({"X-Tenant-ID": "team-a"}, {"model": "gpt-4o"}),
    "tools and a limit": ({}, {"max_tokens": 7, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    "a permit to leave": ({}, {"allow_remote": True}),
}
OF_THE_WAY = frozenset({"seconds_left", "report_to", "fallbacks", "traceparent"})
"""Fields of a placement that the ways fill differently: the time that is left, and what only the lane has."""


@pytest.mark.parametrize("saying", SAYINGS)
async def test_the_scheduler_hears_the_same_of_a_request_by_both_ways(saying: str) -> None:
    headers, fields = SAYINGS[saying]
    body = json.dumps({**CHAT, **fields}).encode()
    async with both(ScriptedDispatcher(), ScriptedDispatcher(), fleet=fleet()) as (gateway, lane):
        for each in (gateway, lane):
            answer = await each.request("POST", LANE_PATHS[0], body, {"X-Request-Id": "r-1", **headers})
            assert answer.status == 200, answer
        asked = placement_request(gateway.dispatcher.contexts[0], gateway.dispatcher.payloads[0], seconds_left=None)
        (placed,) = lane.scheduler.placed
    names = {field.name for field in dataclass_fields(placed)} - OF_THE_WAY
    assert {name: getattr(placed, name) for name in names} == {name: getattr(asked, name) for name in names}
    assert bool(placed.affinity_key) == ("session" in saying or "body" in saying)


def test_the_comparison_sees_what_differs() -> None:
    good = RawResponse(200, {"content-type": "application/json", "date": "today"}, b'{"id": "a", "x": 1}')
    assert differences(good, replace(good, headers={**good.headers, "date": "later", "x-weft-reason": "R"})) == []
    assert differences(good, replace(good, body=b'{"id": "b", "x": 1}')) == []
    for other in (
        replace(good, status=201),
        replace(good, headers={}),
        replace(good, headers={**good.headers, "x-more": "1"}),
        replace(good, body=b'{"id": "a", "x": 2}'),
    ):
        assert len(differences(good, other)) == 1
