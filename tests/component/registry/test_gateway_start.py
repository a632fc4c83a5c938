"""Start of a gateway over a registry in another process."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from key_stage import registry_with_keys

from weft_app.compose import gateway
from weft_app.compose.home import WeftHome
from weft_app.compose.key_ring import KeyRingWatcher
from weft_app.config.config import AddressSettings, AuthSettings, WeftConfig

LONG_SECONDS = 60.0
"""Longer than any start on a busy machine."""
KEYS_SECONDS = 0.05
"""How late the keys arrive. A gateway that does not wait for them has opened its port before."""


@pytest.mark.slow("builds a whole gateway")
async def test_gateway_opens_its_port_only_once_it_knows_the_api_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy that had not noticed its restart got 503 "has not loaded the API keys yet" for the first requests.
    monkeypatch.setattr(gateway, "REGISTRY_WAIT_SECONDS", LONG_SECONDS)
    follow_once = KeyRingWatcher._follow
    opened_before_keys: list[bool] = []

    async def follow_late(self: KeyRingWatcher) -> None:
        await asyncio.sleep(KEYS_SECONDS)
        opened_before_keys.append(announced.done())
        await follow_once(self)

    monkeypatch.setattr(KeyRingWatcher, "_follow", follow_late)
    announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    home = WeftHome(tmp_path / "home")
    home.create()
    address = f"unix:{tmp_path}/registry.sock"
    config = WeftConfig(
        port=0, auth=AuthSettings(required=True), addresses=AddressSettings(registry=address, router=address)
    )
    async with registry_with_keys(tmp_path) as stage, aiohttp.ClientSession() as client:
        _, key = await stage.create(scopes=["models:view"])
        serving = asyncio.create_task(gateway.serve_gateway(config, home, announced.set_result))
        async with asyncio.timeout(LONG_SECONDS):
            url = await announced
        async with client.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert opened_before_keys == [False]
