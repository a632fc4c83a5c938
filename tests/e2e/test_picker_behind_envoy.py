"""A picker that keeps the protocol behind a real Envoy, as gateways of the Gateway API run it, and as weft does."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from picker_envoy import (
    DIGEST_HEADER,
    ENDPOINT_HEADER,
    TOKENS,
    Endpoint,
    EnvoyMode,
    running_endpoints,
    running_gateway,
)

from weft.api.envoy.v1.base_pb2 import HeaderValueOption
from weft.api.envoy.v1.external_processor_pb2 import ProcessingResponse
from weft.kernel.lane_names import DESTINATION
from weft_testing.free_port import free_port
from weft_testing.reference_picker import TEST_SERVED, Make, ReferencePicker, ReferenceSettings, running_picker

MODES = pytest.mark.parametrize("mode", list(EnvoyMode))
STREAMS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What runs."""

    url: str
    endpoints: list[Endpoint]
    picker: ReferencePicker
    http: aiohttp.ClientSession

    async def post(self, **fields: Any) -> aiohttp.ClientResponse:
        """Returns a response, whose body has been read."""
        body = json.dumps({"model": "m", "messages": []} | fields).encode()
        response = await self.http.post(f"{self.url}/v1/chat/completions", data=body)
        await response.read()
        return response


@asynccontextmanager
async def stage(
    folder: Path, mode: EnvoyMode, make: Make = ReferencePicker, *, dead: int = 0, **settings: Any
) -> AsyncIterator[Stage]:
    """Yields two endpoints, a picker and an Envoy; `dead` further endpoints come first and do not listen."""
    async with running_endpoints(2) as endpoints, aiohttp.ClientSession() as http:
        alive = [endpoint.address for endpoint in endpoints]
        gone = [f"127.0.0.1:{free_port()}" for _ in range(dead)]
        chosen = ReferenceSettings(endpoints=(*gone, *alive), **settings)
        async with running_picker(chosen, make) as running:
            with running_gateway(folder, running.port, [*gone, *alive], mode) as url:
                yield Stage(url=url, endpoints=endpoints, picker=running.picker, http=http)


@MODES
@pytest.mark.parametrize("size", [0, 100_000, 1_200_000])
async def test_a_body_reaches_its_endpoint_exactly_once(tmp_path: Path, mode: EnvoyMode, size: int) -> None:
    async with stage(tmp_path, mode) as stage_:
        body = json.dumps({"model": "m", "padding": "x" * size}).encode()
        response = await stage_.http.post(f"{stage_.url}/v1/chat/completions", data=io.BytesIO(body))
        assert (response.status, (await response.json())["bytes"]) == (200, len(body))
        assert response.headers[DIGEST_HEADER] == hashlib.sha256(body).hexdigest()


@MODES
async def test_no_token_of_many_streams_is_lost(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode, max_running=STREAMS) as stage_:
        responses = await asyncio.gather(*(stage_.post(stream=True) for _ in range(STREAMS)))
        expected = "".join(f"data: {number}\n\n" for number in range(TOKENS))
        assert {await response.text() for response in responses} == {expected}
        assert {response.headers[ENDPOINT_HEADER] for response in responses} == {e.address for e in stage_.endpoints}


@MODES
async def test_a_destination_of_the_caller_is_not_obeyed(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode, max_running=100) as stage_:
        first, second = (endpoint.address for endpoint in stage_.endpoints)
        served = []
        for wanted in (first, second) * 4:
            body = json.dumps({"model": "m"})
            headers = {DESTINATION: wanted}
            response = await stage_.http.post(f"{stage_.url}/v1/chat/completions", data=body, headers=headers)
            served.append((wanted, response.headers[ENDPOINT_HEADER]))
        got = [headers[DESTINATION] for endpoint in stage_.endpoints for headers in endpoint.requests]
    assert len({chosen for wanted, chosen in served if wanted == first}) == 1, "the turn of the picker decides"
    assert all("," not in each for each in got), "the caller's value is not kept beside the picker's"


class AppendsItsHeader(ReferencePicker):
    def headers_answer(self, destination: str) -> ProcessingResponse:
        answer = super().headers_answer(destination)
        for option in answer.request_headers.response.header_mutation.set_headers:
            option.append_action = HeaderValueOption.HEADER_APPEND_ACTION_UNSPECIFIED
        return answer


async def test_envoy_replaces_a_header_of_the_caller_whose_append_action_is_not_set(tmp_path: Path) -> None:
    async with stage(tmp_path, EnvoyMode.BOTH, AppendsItsHeader) as stage_:
        headers = {DESTINATION: "192.0.2.1:9"}
        body = json.dumps({"model": "m"})
        await stage_.http.post(f"{stage_.url}/v1/chat/completions", data=body, headers=headers)
        got = [(headers[DESTINATION], each.address) for each in stage_.endpoints for headers in each.requests]
    assert [wanted == served for wanted, served in got] == [True]


@MODES
async def test_the_picker_answers_callers_itself(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode, unready_models=("cold",)) as stage_:
        malformed = await stage_.http.post(f"{stage_.url}/v1/chat/completions", data=b"{")
        assert (malformed.status, (await malformed.json())["error"]["message"]) == (400, "the body is no JSON")
        assert (await stage_.post(model="cold")).status == 503
    async with stage(tmp_path, mode, max_running=0) as stage_:
        assert (await stage_.post()).status == 429
        assert [endpoint.requests for endpoint in stage_.endpoints] == [[], []]


@MODES
async def test_a_request_without_a_body_is_routed(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode) as stage_:
        response = await stage_.http.get(f"{stage_.url}/v1/models")
        assert (response.status, (await response.json())["bytes"]) == (200, 0)


@MODES
async def test_the_second_endpoint_of_a_list_serves_where_the_first_is_gone(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode, dead=1, fallbacks=2, hooks=True) as stage_:
        responses = [await stage_.post() for _ in range(3)]
        assert {response.status for response in responses} == {200}
        for response in responses if mode is EnvoyMode.BOTH else []:
            assert response.headers[TEST_SERVED] == response.headers[ENDPOINT_HEADER], "the one that served is named"


@MODES
async def test_places_of_callers_that_leave_are_free_again(tmp_path: Path, mode: EnvoyMode) -> None:
    async with stage(tmp_path, mode, max_running=4) as stage_:
        for _ in range(8):
            request = stage_.http.post(f"{stage_.url}/v1/chat/completions", data=b'{"model": "m", "stream": true}')
            async with request as response:
                assert response.status in {200, 429}
                response.close()
        await stage_.picker.idle()
        assert (await stage_.post()).status == 200
