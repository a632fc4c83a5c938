"""The lane's configuration in the real Envoy: a scripted picker, runners and a gateway that say what they got."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from kit.envoy import running_envoy

from weft.api.envoy.v1 import access_log_pb2, base_pb2
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.kernel.lane_names import (
    ACCESS_LOG_SERVICE,
    ANSWER_NAMESPACE,
    DESTINATION,
    DESTINATION_NAMESPACE,
    EXTERNAL_PROCESSOR,
    GATEWAYS,
    PLACED,
    REASON_HEADER,
    TICKET_HEADER,
    TRY_NEXT_HEADER,
)
from weft_app.config.config import WeftConfig
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, endpoint_of, limits_of
from weft_testing.free_port import free_port

CHAT = "/v1/chat/completions"
LOG_SECONDS = 10.0


@dataclass
class Picker:
    """Answers what it is told to, and notes what it is asked."""

    destinations: str = ""
    placed: str = ""
    """Model and runner of its requests; empty: it sends them to a gateway."""
    headers: dict[str, str] = field(default_factory=dict)
    answer_headers: dict[str, str] = field(default_factory=dict)
    refusal: pb.ImmediateResponse | None = None
    asked: list[dict[str, str]] = field(default_factory=list)
    logged: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    async def process(self, requests: AsyncIterator[pb.ProcessingRequest], _: Any) -> AsyncIterator[Any]:
        body = b""
        async for message in requests:
            if message.HasField("request_headers"):
                headers = message.request_headers.headers.headers
                self.asked.append({each.key: each.raw_value.decode() or each.value for each in headers})
            if message.HasField("request_body"):
                body += message.request_body.body
                if message.request_body.end_of_stream:
                    for answer in self._answers(body):
                        yield answer

    def _answers(self, body: bytes) -> list[pb.ProcessingResponse]:
        if self.refusal is not None:
            return [pb.ProcessingResponse(immediate_response=self.refusal)]
        routed = pb.ProcessingResponse()
        overwrite = base_pb2.HeaderValueOption.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
        several = {"x-envoy-max-retries": str(self.destinations.count(","))}
        for name, value in {DESTINATION: self.destinations, **several, **self.headers}.items():
            option = routed.request_headers.response.header_mutation.set_headers.add(append_action=overwrite)
            option.header.key, option.header.raw_value = name, value.encode()
        named = routed.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
        named.fields[DESTINATION].string_value = self.destinations
        if self.placed:
            named.fields[PLACED].string_value = self.placed
        for name, value in self.answer_headers.items():
            routed.dynamic_metadata.fields[ANSWER_NAMESPACE].struct_value.fields[name].string_value = value
        again = [routed]
        for start in range(0, len(body), 60_000):
            chunk = pb.ProcessingResponse()
            streamed = chunk.request_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = body[start : start + 60_000], start + 60_000 >= len(body)
            again.append(chunk)
        return again

    async def log(self, messages: AsyncIterator[access_log_pb2.StreamAccessLogsMessage], _: Any) -> Any:
        async for message in messages:
            for entry in message.http_logs.log_entry:
                self.logged.put_nowait(entry)
        return access_log_pb2.StreamAccessLogsResponse()


@dataclass
class Party:
    """A runner or a gateway: its address, and how it answers."""

    name: str
    address: str
    got: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.got.append({"path": request.path, "headers": dict(request.headers.items()), "size": len(body)})
        return web.json_response({"served_by": self.name}, status=self.status, headers=self.headers)


@dataclass
class Lane:
    """All of it."""

    url: str
    picker: Picker
    first: Party
    second: Party
    gateway: Party
    stop_picker: Callable[[], Awaitable[None]]

    async def ask(self, path: str = CHAT, **options: Any) -> tuple[int, dict[str, Any], Any]:
        async with aiohttp.ClientSession(self.url) as http, http.post(path, **(options or {"json": {}})) as answer:
            return answer.status, await answer.json(), answer.headers

    async def served_by(self, path: str = CHAT, **options: Any) -> str:
        _, body, _ = await self.ask(path, **options)
        return str(body["served_by"])


async def _endpoint(name: str, stack: AsyncExitStack) -> Party:
    app = web.Application(client_max_size=64 * 1024 * 1024)
    runner = web.AppRunner(app)
    port = free_port()
    endpoint = Party(name, f"127.0.0.1:{port}")
    app.router.add_route("*", "/{path:.*}", endpoint.answer)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return endpoint


@pytest.fixture
async def lane(tmp_path: Path) -> AsyncIterator[Lane]:
    async with AsyncExitStack() as stack:
        picker = Picker()
        first, second, gateway = [await _endpoint(name, stack) for name in ("first", "second", "gateway")]
        server = grpc.aio.server()
        process = grpc.stream_stream_rpc_method_handler(
            picker.process, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        log = grpc.stream_unary_rpc_method_handler(
            picker.log,
            access_log_pb2.StreamAccessLogsMessage.FromString,
            access_log_pb2.StreamAccessLogsResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": process}),
                grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {"StreamAccessLogs": log}),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        picked = LanePlan(
            picker=Endpoint(host="127.0.0.1", port=port),
            endpoints=tuple(endpoint_of(each.address, "test") for each in (first, second)),
        )
        plan = EdgePlan(
            listen=Endpoint(host="127.0.0.1", port=0),
            gateways=(endpoint_of(gateway.address, "test"),),
            limits=limits_of(WeftConfig()),
            lane=picked,
        )
        address = await asyncio.to_thread(stack.enter_context, running_envoy(edge_document(plan), tmp_path))
        yield Lane(f"http://{address}", picker, first, second, gateway, lambda: server.stop(None))


async def test_a_request_goes_to_the_endpoint_that_the_picker_names_whether_it_is_listed_or_not(lane: Lane) -> None:
    for endpoint in (lane.first, lane.second, lane.gateway):
        lane.picker.destinations = endpoint.address
        assert await lane.served_by() == endpoint.name


async def test_a_request_goes_to_a_gateway_where_the_picker_says_so(lane: Lane) -> None:
    lane.picker.destinations = GATEWAYS
    assert await lane.served_by(headers={"authorization": "Bearer key"}, json={}) == "gateway"
    assert lane.gateway.got[0]["headers"]["Authorization"] == "Bearer key"


async def test_a_body_of_3_mb_arrives_whole(lane: Lane) -> None:
    lane.picker.destinations = lane.first.address
    sent = json.dumps({"text": "x" * 3_000_000})
    assert await lane.served_by(data=io.BytesIO(sent.encode())) == "first"
    assert lane.first.got[0]["size"] == len(sent)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_other_paths_go_to_a_gateway_and_the_picker_is_not_asked(lane: Lane, method: str) -> None:
    async with aiohttp.ClientSession(lane.url) as http, http.request(method, "/v1/responses") as answer:
        assert (await answer.json())["served_by"] == "gateway"
    assert lane.picker.asked == []


async def test_a_page_of_another_origin_goes_to_a_gateway(lane: Lane) -> None:
    assert await lane.served_by(headers={"origin": "https://app.example"}, json={}) == "gateway"
    assert lane.picker.asked == []


async def test_callers_cannot_send_the_headers_of_the_mesh(lane: Lane) -> None:
    lane.picker.destinations = lane.first.address
    forged = {TICKET_HEADER: "forged", DESTINATION: lane.second.address, "x-weft-anything": "1"}
    assert await lane.served_by(headers=forged, json={}) == "first"
    assert await lane.served_by("/v1/responses", headers=forged, json={}) == "gateway"
    (asked,) = lane.picker.asked
    got = [lane.first.got[0]["headers"], lane.gateway.got[0]["headers"]]
    assert not any(name.lower().startswith("x-weft-") for headers in (asked, *got) for name in headers)
    assert DESTINATION not in asked
    assert DESTINATION not in got[1]


async def test_the_tickets_of_the_picker_arrive(lane: Lane) -> None:
    lane.picker.destinations, lane.picker.headers = lane.first.address, {TICKET_HEADER: "a.b"}
    await lane.ask()
    assert lane.first.got[0]["headers"][TICKET_HEADER] == "a.b"


async def test_the_second_endpoint_answers_where_the_first_is_dead(lane: Lane) -> None:
    lane.picker.destinations = f"127.0.0.1:{free_port()},{lane.second.address}"
    assert await lane.served_by() == "second"


async def test_the_second_endpoint_answers_where_the_first_fails_before_content(lane: Lane) -> None:
    lane.first.status, lane.first.headers = 503, {REASON_HEADER: "OVERLOADED", TRY_NEXT_HEADER: "true"}
    lane.picker.destinations = f"{lane.first.address},{lane.second.address}"
    assert await lane.served_by() == "second"
    assert (len(lane.first.got), len(lane.second.got)) == (1, 1)


@pytest.mark.parametrize(("status", "reason"), [(400, "INVALID_ARGUMENT"), (499, "CANCELLED"), (502, "SERVER_DIED")])
async def test_an_answer_that_another_runner_could_not_better_is_not_asked_for_again(
    lane: Lane, status: int, reason: str
) -> None:
    lane.first.status, lane.first.headers = status, {REASON_HEADER: reason}
    lane.picker.destinations = f"{lane.first.address},{lane.second.address}"
    assert (await lane.ask())[:2] == (status, {"served_by": "first"})
    assert lane.second.got == []


@pytest.mark.parametrize("listed", [1, 2])
async def test_the_answer_of_the_last_endpoint_is_passed_on_as_it_is(lane: Lane, listed: int) -> None:
    for endpoint in (lane.first, lane.second):
        endpoint.status = 503
        endpoint.headers = {REASON_HEADER: "OVERLOADED", TRY_NEXT_HEADER: "true", "retry-after": "7"}
    lane.picker.destinations = ",".join([lane.first.address, lane.second.address][:listed])
    status, body, headers = await lane.ask()
    assert (status, body["served_by"], headers["retry-after"]) == (503, ["first", "second"][listed - 1], "7")
    assert TRY_NEXT_HEADER not in headers
    assert lane.gateway.got == []


async def test_a_status_without_the_reason_header_is_not_tried_again(lane: Lane) -> None:
    lane.first.status = 503
    lane.picker.destinations = f"{lane.first.address},{lane.second.address}"
    assert (await lane.ask())[1]["served_by"] == "first"
    assert lane.second.got == []


@pytest.mark.parametrize("listed", [1, 2])
async def test_an_answer_has_the_rate_limits_that_the_picker_knows_and_the_id_of_its_request(
    lane: Lane, listed: int
) -> None:
    lane.picker.destinations = ",".join([lane.first.address, lane.second.address][:listed])
    lane.picker.headers = {"x-request-id": "req-1"}
    lane.picker.answer_headers = {"x-ratelimit-limit-requests": "20", "x-ratelimit-reset-requests": "1m0s"}
    _, _, headers = await lane.ask(json={}, headers={"x-request-id": "of the caller"})
    assert headers["x-request-id"] == "req-1"
    found = {name: value for name, value in headers.items() if name.startswith("x-ratelimit")}
    assert found == lane.picker.answer_headers
    # What Envoy answers itself has them, too.
    lane.picker.destinations = f"127.0.0.1:{free_port()}"
    status, _, headers = await lane.ask()
    assert (status, headers["x-request-id"], headers["x-ratelimit-limit-requests"]) == (503, "req-1", "20")
    # The negative control: where nothing is known, nothing is said.
    lane.picker.destinations, lane.picker.headers, lane.picker.answer_headers = lane.first.address, {}, {}
    _, _, headers = await lane.ask()
    assert not [name for name in headers if name.startswith(("x-ratelimit", "x-request-id"))]


async def test_what_the_picker_answers_itself_is_passed_on_as_it_is(lane: Lane) -> None:
    refusal = lane.picker.refusal = pb.ImmediateResponse(
        status=pb.HttpStatus(code=429), body=b'{"error": {"code": "queue_full"}}', details="QUEUE_FULL"
    )
    for name, value in (("retry-after", "3"), ("content-type", "application/json")):
        option = refusal.headers.set_headers.add()
        option.header.key, option.header.raw_value = name, value.encode()
    status, body, headers = await lane.ask()
    assert (status, body, headers["retry-after"]) == (429, {"error": {"code": "queue_full"}}, "3")


async def test_a_picker_that_is_gone_is_a_503_in_the_envelope_of_the_mesh(lane: Lane) -> None:
    await lane.stop_picker()
    status, body, headers = await lane.ask()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "service_unavailable", "1")
    assert "picker" in body["error"]["message"]


async def test_an_endpoint_that_cannot_be_reached_is_answered_in_the_envelope_of_the_mesh(lane: Lane) -> None:
    lane.picker.destinations = f"127.0.0.1:{free_port()}"
    status, body, headers = await lane.ask()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "service_unavailable", "1")


async def test_a_runner_that_cannot_be_reached_is_not_said_to_be_a_mesh_that_is_gone(lane: Lane) -> None:
    lane.picker.destinations = f"127.0.0.1:{free_port()}"
    for placed, words in (
        ("tiny on r1", "the runner or engine that was to answer cannot be reached"),
        ("", "the mesh"),
    ):
        lane.picker.placed = placed
        status, body, headers = await lane.ask()
        assert (status, body["error"]["code"]) == (503, "service_unavailable")
        assert (headers["retry-after"], headers["x-should-retry"]) == ("1", "true")
        assert body["error"]["message"].startswith(words)


async def test_a_runner_that_ends_its_connection_before_it_answers_is_named_as_what_ended(lane: Lane) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        lane.picker.destinations, lane.picker.placed = f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny on r1"
        status, body, headers = await lane.ask()
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "service_unavailable", "1")
    assert body["error"]["message"].startswith("the runner or engine ended the connection before it answered")


async def test_the_picker_gets_the_log_of_what_it_placed_and_of_nothing_else(lane: Lane) -> None:
    lane.picker.destinations = f"127.0.0.1:{free_port()},{lane.second.address}"
    await lane.ask("/v1/responses")
    await lane.ask(headers={"x-request-id": "req-7"}, json={})
    entry = await asyncio.wait_for(lane.picker.logged.get(), LOG_SECONDS)
    assert entry.request.request_id == "req-7"
    assert entry.common_properties.upstream_remote_address.socket_address.port_value == int(
        lane.second.address.rpartition(":")[2]
    )
    assert lane.picker.logged.empty()


async def test_an_answer_that_is_late_is_a_504_in_the_envelope_of_the_mesh(lane: Lane) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        lane.picker.destinations = f"127.0.0.1:{silent.getsockname()[1]}"
        lane.picker.headers = {"x-envoy-upstream-rq-timeout-ms": "200"}
        status, body, _ = await lane.ask()
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_list_of_endpoints_that_are_all_unknown_goes_to_no_other_one(lane: Lane) -> None:
    lane.picker.destinations = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    status, body, _ = await lane.ask()
    assert (status, body["error"]["code"]) == (503, "service_unavailable")
    assert [each.got for each in (lane.first, lane.second, lane.gateway)] == [[], [], []]
