"""Two runners of central models, as processes apart with homes of their own, over TLS: one serves, the other waits."""

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from kit.counting_provider import CountingProvider, counting_provider
from mesh_process import eventually
from tls_mesh import TlsMesh, weft

from weft.kernel.values.names import CENTRAL_RUNNER

pytestmark = pytest.mark.nightly("kills a registry of a pair")

MODEL, KEY = "frontier", "sk-canary-0123456789"
NAMES = ("central-one", "central-two")
TASKS = "/api/v1/inference-tasks"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Count."}], "allow_remote": True}
INACTIVE_SECONDS = 3.0
WITHIN_SECONDS = 60.0
QUICK = {
    "inactive_after_seconds": INACTIVE_SECONDS,
    "heartbeat_interval_seconds": 0.5,
    "report_interval_seconds": 0.5,
    "restart_grace_seconds": 0.5,
}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[TlsMesh]:
    running = TlsMesh(tmp_path)
    try:
        running.start_services(**QUICK)
        for name in NAMES:
            running.start_central(name)
        yield running
    finally:
        codes = running.services.end_all()
    assert set(codes) == {0}


@pytest.fixture
async def provider(mesh: TlsMesh) -> AsyncIterator[CountingProvider]:
    """The provider of MODEL, which is declared with a secret."""
    async with counting_provider() as provider:
        secret = mesh.folder / "secret"
        secret.write_text(KEY)
        await _weft(mesh, "keys", "secret", "create", "k", "--from-file", str(secret))
        await _weft(mesh, "models", "create", MODEL, "--url", provider.base_url, "--api-key-ref", "secret/k")
        yield provider


async def _weft(mesh: TlsMesh, *arguments: str) -> str:
    places = {"WEFT_URL": mesh.addresses["gateway"], "WEFT_REGISTRY": mesh.addresses["registry"]}
    code, out, error = await weft(*arguments, **places, **mesh.environment("operator"))
    assert code == 0, error
    return out


async def _serving(mesh: TlsMesh) -> str:
    """The runner that the registry names, by the address of its process; empty: none is alive."""
    listed = json.loads(await _weft(mesh, "get", "runners", "-o", "json"))["items"]
    alive = [each["status"]["address"] for each in listed if each["status"]["state"] == "active"]
    assert len(alive) <= 1, "two of them serve at once"
    assert all(each["metadata"]["name"] == CENTRAL_RUNNER for each in listed if "metadata" in each)
    return next((name for name in NAMES if alive == [mesh.addresses[name]]), "")


class Caller:
    """Sends chats to the gateway, over TLS."""

    def __init__(self, mesh: TlsMesh, http: aiohttp.ClientSession) -> None:
        self._url, self._http = mesh.addresses["gateway"], http
        self._trusted = ssl.create_default_context(cadata=mesh.ca.root.decode())

    async def ask(self) -> int:
        """Returns the status of one chat."""
        async with self._http.post(f"{self._url}/v1/chat/completions", json=CHAT, ssl=self._trusted) as response:
            await response.read()
            return response.status

    async def is_served(self) -> bool:
        """Whether a chat is answered."""
        return await self.ask() == 200

    async def submit(self) -> str:
        """Returns the id of a task with one chat."""
        body = {"endpoint": "/v1/chat/completions", "body": CHAT}
        async with self._http.post(f"{self._url}{TASKS}", json=body, ssl=self._trusted) as response:
            return str((await response.json())["id"])

    async def ended(self, task: str) -> str:
        """Returns the state of a task once it has ended; empty: it has not."""
        async with self._http.get(f"{self._url}{TASKS}/{task}", ssl=self._trusted) as response:
            state = str((await response.json())["state"])
        return "" if state in ("pending", "running") else state


async def test_second_central_runner_takes_over_when_the_first_is_killed_and_both_never_serve(
    mesh: TlsMesh, provider: CountingProvider
) -> None:
    statuses: list[int] = []
    over = asyncio.Event()
    async with aiohttp.ClientSession() as http:
        caller = Caller(mesh, http)

        async def call() -> None:
            while not over.is_set():
                statuses.append(await caller.ask())

        await eventually(caller.is_served, WITHIN_SECONDS, "the model was not served")
        first = await _serving(mesh)
        asked = len(provider.requests)
        callers = [asyncio.create_task(call()) for _ in range(3)]
        await eventually(lambda: len(statuses) > 6, WITHIN_SECONDS, "no request was answered")
        assert await _serving(mesh) == first, "the other one waits"
        assert set(statuses) == {200}
        mesh.services.end(first, signal.SIGKILL)
        so_far = len(statuses)
        task = await caller.submit()
        await eventually(lambda: statuses[so_far:].count(200) > 9, WITHIN_SECONDS, "the other one did not take over")
        over.set()
        await asyncio.gather(*callers)
        assert await _serving(mesh) == next(name for name in NAMES if name != first)
        state = await eventually(lambda: caller.ended(task), WITHIN_SECONDS, "the task did not end")
    assert state == "completed", "a task that came while none served is done by the other one"
    assert set(statuses) <= {200, 502, 503}, "every request is answered, in between with an error to try again upon"
    since = statuses.index(200, next(index for index, status in enumerate(statuses) if status != 200))
    late = [status for status in statuses[since + len(callers) :] if status != 200]
    assert late == [], "once the other one serves, every request is answered"
    # What was with the killed one when it died may have been sent, and is sent once more by the other.
    answered = statuses.count(200) + 1
    assert answered <= len(provider.requests) - asked <= answered + len(callers)
    assert {request.headers["authorization"] for request in provider.requests} == {f"Bearer {KEY}"}
