"""A dial-out runner and two routers with a relay each: docs/deploy.md. One of the routers ends."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from apart_mesh import Apart
from join_process import JoinProcess, laptop_server, running_join
from kit.fake_backend import run_fake_backend
from mesh_process import eventually, run_weft, write_config

from weft_app.compose.authority import self_signed_certificate
from weft_testing.free_port import free_port

pytestmark = pytest.mark.nightly("ends routers under streams of a laptop")

pytest_plugins = ("database_fixtures",)

ROUTERS = ("r1", "r2")
LIMIT_SECONDS = 30.0
DRAIN_SECONDS = 20.0
TOKENS = 60
TOKENS_PER_SECOND = 30


@dataclass
class Relays:
    """Registry and gateway, and routers with a relay each, which have one certificate."""

    mesh: Apart
    routers: dict[str, Apart]
    url: str
    targets: list[str]
    """Where runners join, in the order of ROUTERS."""
    fingerprint: str

    async def invitation(self) -> str:
        """One invitation to both relays, made as docs/deploy.md says."""
        options = [word for target in self.targets for word in ("--address", target)]
        code, out, error = await run_weft(
            *("runner", "token", "create", *options, "--fingerprint", self.fingerprint, "-o", "json"),
            home=self.mesh.home,
        )
        assert code == 0, error
        command: str = json.loads(out)["joinCommand"]
        return command.removeprefix("weft runner join ")

    async def holder(self) -> str:
        """The router over whose relay the laptop is reached; empty: it is not reached."""
        out = await self.mesh.weft("get", "runners", "-o", "json")
        for runner in json.loads(out)["items"]:
            status = runner["status"]
            if runner["name"] == "laptop" and status["state"] == "active" and not status["draining"]:
                return next(name for name in ROUTERS if str(self.routers[name].home) in status["address"])
        return ""

    async def until_held(self, *, by_other_than: str = "") -> str:
        async def held() -> str:
            found = await self.holder()
            return "" if found == by_other_than else found

        found: str = await eventually(held, LIMIT_SECONDS, "the laptop is not reached")
        return found


@contextmanager
def running_relays(folder: Path, database_url: str) -> Iterator[Relays]:
    certificate = self_signed_certificate(folder / "tls", [])
    mesh = Apart(folder / "home", write_config(folder))
    routers: dict[str, Apart] = {}
    targets = []
    try:
        mesh.start("registry")
        for name in ROUTERS:
            targets.append(f"127.0.0.1:{free_port()}")
            (folder / name).mkdir()
            settings = {
                "addresses": {"registry": f"unix:{mesh.home}/run/registry.sock"},
                "router": {"name": name, "database_url": database_url},
                "relay": {
                    "listen": targets[-1],
                    "certificate_file": str(folder / "tls" / "cert.pem"),
                    "key_file": str(folder / "tls" / "key.pem"),
                },
                "drain_seconds": DRAIN_SECONDS,
            }
            (folder / name / "weft.yaml").write_text(yaml.safe_dump(settings))
            routers[name] = Apart(folder / name / "home", folder / name / "weft.yaml")
            routers[name].start("router")
        yield Relays(mesh, routers, mesh.start("gateway"), targets, certificate.fingerprint)
    finally:
        for each in (*routers.values(), mesh):
            each.end_all()


@asynccontextmanager
async def joined(folder: Path, database_url: str) -> AsyncIterator[tuple[Relays, JoinProcess]]:
    """A laptop that has joined by one invitation, and can be called."""
    flags = ("--parallel", "8")
    async with run_fake_backend(*flags, answer_tokens=TOKENS, tokens_per_second=TOKENS_PER_SECOND) as backend:
        with (
            running_relays(folder, database_url) as relays,
            running_join(folder / "laptop", await relays.invitation(), "", *laptop_server(backend.base_url)) as laptop,
        ):
            await laptop.until("joined as laptop")
            await eventually(lambda: _answers(relays), LIMIT_SECONDS, "llama does not answer")
            yield relays, laptop


async def _answers(relays: Relays) -> bool:
    async with _chat(relays, tokens=2) as response:
        return response.status == 200


@asynccontextmanager
async def _chat(relays: Relays, tokens: int, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **more}
    timeout = aiohttp.ClientTimeout(total=2 * LIMIT_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{relays.url}/v1/chat/completions", json=body) as response,
    ):
        yield response


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _text(event: dict[str, Any]) -> str:
    assert "error" not in event, event
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def test_chats_continue_when_the_router_of_a_laptop_is_killed(tmp_path: Path, postgres_url: str) -> None:
    async with joined(tmp_path, postgres_url) as (relays, laptop):
        assert await relays.holder() == "r1"
        assert "fail" not in laptop.output
        relays.routers["r1"].end("router", signal.SIGKILL)
        assert await relays.until_held(by_other_than="r1") == "r2"
        for _ in range(3):
            async with _chat(relays, tokens=2) as response:
                assert response.status == 200, await response.text()


async def test_stopping_router_lets_a_laptop_stream_finish(tmp_path: Path, postgres_url: str) -> None:
    async with joined(tmp_path, postgres_url) as (relays, _):
        assert await relays.until_held() == "r1"
        async with _chat(relays, tokens=TOKENS, stream=True) as response:
            events = _events(response)
            texts = [_text(await anext(events))]
            while not texts[-1]:
                texts.append(_text(await anext(events)))
            ending = asyncio.create_task(asyncio.to_thread(relays.routers["r1"].end, "router", signal.SIGTERM))
            texts += [_text(event) async for event in events]
        assert "".join(texts).count("tok") == TOKENS
        assert await ending == 0
        assert await relays.until_held(by_other_than="r1") == "r2"
        assert await _answers(relays)
