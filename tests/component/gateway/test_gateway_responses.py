from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from gateway_script import (
    serving,
)
from response_script import PATH, body

from gateway.gateway_config import GatewayConfig, ResponseEnvelope
from gateway.media import MediaAddress, MediaConfig
from weft.api.common.v1 import chat_pb2
from weft_testing.media_files import png


class Pictures:
    """A MediaSource that has every file."""

    async def fetch(self, addresses: Sequence[MediaAddress]) -> Mapping[str, chat_pb2.MediaPart]:
        return {address.url: chat_pb2.MediaPart(data=png(1, 1), media_type="image/png") for address in addresses}


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_receives_the_bytes_of_a_url(stream: bool) -> None:
    config = GatewayConfig(port=0, media=MediaConfig(allowed_hosts=("images.example.org",)))
    part = {"type": "input_image", "image_url": "https://images.example.org/a.png", "detail": "original"}
    async with serving(config=config, media=Pictures()) as gateway:
        asked = body(input=[{"role": "user", "content": [part]}], stream=stream)
        answer = await gateway.request("POST", PATH, asked)
        image = gateway.dispatcher.payloads[-1].messages[0].content[0].image
    assert answer.status == 200
    assert (image.data, image.media_type, image.detail) == (png(1, 1), "image/png", "high")


async def test_request_envelope_overrides_the_gateway_default() -> None:
    async def items_of(config: GatewayConfig, **fields: Any) -> list[str]:
        async with serving(config=config) as gateway:
            answer = await gateway.request("POST", PATH, body(**fields))
        found = answer.json
        assert ("output_text" in found) == ("metrics" in found) == (found["output"][0]["type"] == "output_text")
        return [item["type"] for item in found["output"]]

    for_pools = GatewayConfig(port=0, response_envelope=ResponseEnvelope.POOL)
    assert await items_of(GatewayConfig(port=0)) == ["message"]
    assert await items_of(GatewayConfig(port=0), envelope="pool") == ["output_text"]
    assert await items_of(for_pools) == ["output_text"]
    assert await items_of(for_pools, envelope="openai") == ["message"]


async def test_response_is_reported_unstored_without_a_response_store() -> None:
    async with serving() as gateway:
        answer = (await gateway.request("POST", PATH, body())).json
        asked = await gateway.request("POST", PATH, body(store=True))
        previous = await gateway.request("POST", PATH, body(previous_response_id="resp_1"))
        read = await gateway.request("GET", f"{PATH}/{answer['id']}")
    assert (answer["store"], "warnings" in answer) == (False, False)
    assert asked.refusal[::2] == (400, "store")
    assert previous.refusal == (404, "previous_response_not_found", "previous_response_id")
    assert read.status == 404
