"""A lane over real processes: a mesh with a picker, a real Envoy before it, and a client."""

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
from apart_mesh import Apart
from kit.envoy import running_envoy
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft_app.config.loader import load_config
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import EdgePlan, Endpoint, LanePlan, limits_of
from weft_testing.fake_backend.process import FakeControl
from weft_testing.free_port import free_port

SECONDS = 30.0
CHAT = "/v1/chat/completions"
QUICK = {"records": {"flush_interval_seconds": 0.1, "lost_after_seconds": 3.0}}
"""A router whose database knows of a request a moment after it has come."""


class Lane:
    """An Envoy before a mesh, and its client."""

    def __init__(self, mesh_url: str, url: str, http: aiohttp.ClientSession) -> None:
        """`mesh_url`: the gateway's, which is asked for records and figures."""
        self.mesh_url = mesh_url
        self.url = url
        self.http = http
        self._count = 0

    def body(self, content: str = "hi", **fields: Any) -> dict[str, Any]:
        return {"model": "pool", "messages": [{"role": "user", "content": content}], **fields}

    def new_id(self) -> str:
        self._count += 1
        return f"req-lane-{self._count}"

    def asking(self, body: dict[str, Any], request_id: str, path: str = CHAT, **headers: str) -> Any:
        named = {"x-request-id": request_id, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.http.post(f"{self.url}{path}", json=body, headers=named)

    async def ask(
        self, body: dict[str, Any], request_id: str, path: str = CHAT, **headers: str
    ) -> tuple[int, Any, Any]:
        async with self.asking(body, request_id, path, **headers) as response:
            return response.status, json.loads(await response.text()), response.headers

    async def ask_in_pieces(self, body: dict[str, Any], request_id: str) -> tuple[int, str]:
        """The status and the text of an answer to a body that is sent in pieces."""
        sent, headers = io.BytesIO(json.dumps(body).encode()), {"content-type": "application/json"}
        async with self.http.post(
            f"{self.url}{CHAT}", data=sent, headers=headers | {"x-request-id": request_id}
        ) as response:
            return response.status, await response.text()

    async def stream_text(
        self, body: dict[str, Any], request_id: str, began: asyncio.Event | None = None
    ) -> tuple[str, bool]:
        """The text of a stream, and whether it was whole; `began` is set with its first content."""
        text: list[str] = []
        async with self.asking({**body, "stream": True}, request_id) as response:
            assert response.status == 200, await response.text()
            try:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        document = json.loads(line[6:])
                        if "error" in document:
                            return "".join(text), False
                        text += [each["delta"].get("content") or "" for each in document["choices"]]
                        if began is not None and text and text[-1]:
                            began.set()
            except aiohttp.ClientPayloadError:
                return "".join(text), False
        return "".join(text), True

    async def begun(self, body: dict[str, Any], request_id: str) -> "asyncio.Task[tuple[str, bool]]":
        """A stream that has its first content."""
        began = asyncio.Event()
        task = asyncio.create_task(self.stream_text(body, request_id, began))
        waiting = asyncio.create_task(began.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=SECONDS)
        waiting.cancel()
        assert began.is_set(), task.result() if task.done() else "no content comes"
        return task

    async def shown(self, request_id: str) -> dict[str, Any]:
        """What is known of a request now; empty: nothing."""
        async with self.http.get(f"{self.mesh_url}/v1/requests/{request_id}") as response:
            found: dict[str, Any] = await response.json() if response.status == 200 else {}
        return found

    async def record(self, request_id: str, *, with_proxy: bool = True) -> dict[str, Any]:
        """The record of a request that has ended, once both witnesses have spoken."""

        async def ended() -> dict[str, Any] | None:
            found = await self.shown(request_id)
            is_whole = "receipt" in found and ("proxy" in found["receipt"] or not with_proxy)
            return found if found.get("state") == "ended" and is_whole else None

        try:
            record: dict[str, Any] = await eventually(ended, SECONDS, f"the request {request_id} has no whole record")
        except AssertionError as error:
            raise AssertionError(f"{error}: {await self.shown(request_id)}") from error
        return record

    async def cancel(self, request_id: str) -> tuple[int, dict[str, Any]]:
        """Cancel a request by its id, as an operator does."""
        async with self.http.post(f"{self.mesh_url}/v1/requests/{request_id}/cancel") as response:
            return response.status, await response.json()

    async def figure(self, beginning: str) -> float:
        async with self.http.get(f"{self.mesh_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(beginning))

    async def placed_on(self, runner: str, body: dict[str, Any]) -> tuple[int, str]:
        """Ask until a request was sent to this runner first: its status, and its id."""

        async def asked() -> tuple[int, str] | None:
            request_id = self.new_id()
            async with self.asking(body, request_id) as response:
                await response.read()
            attempts = (await self.record(request_id))["receipt"]["attempts"]
            return (response.status, request_id) if attempts[0]["runner"] == runner else None

        found: tuple[int, str] = await eventually(asked, SECONDS, f"no request goes to {runner}")
        return found


def lane_runner(name: str, **switches: Any) -> dict[str, Any]:
    return {**fake_runner(name, **switches), "http_port": free_port()}


def engine_lane_runner(name: str, **switches: Any) -> dict[str, Any]:
    """A runner whose engine the proxy calls itself."""
    runner = lane_runner(name, **switches)
    runner["models"][0]["lane"] = "engine"
    return runner


def lane_document(config: Path, picker: int, gateway: int, runners: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The configuration of an Envoy before this mesh."""
    host = "127.0.0.1"
    plan = EdgePlan(
        listen=Endpoint(host=host, port=0),
        gateways=(Endpoint(host=host, port=gateway),),
        limits=limits_of(load_config(config)),
        lane=LanePlan(
            picker=Endpoint(host=host, port=picker),
            endpoints=tuple(Endpoint(host=host, port=each["http_port"]) for each in runners),
        ),
    )
    return edge_document(plan)


@asynccontextmanager
async def running_lane(folder: Path, *runners: dict[str, Any], **sections: Any) -> AsyncIterator["MeshLane"]:
    picker, gateway = free_port(), free_port()
    given = {"port": gateway, "picker": {"listen": f"127.0.0.1:{picker}"}, **sections}
    config = write_config(folder, *runners, **given)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        async with aiohttp.ClientSession() as http:
            with running_envoy(lane_document(config, picker, gateway, runners), folder) as address:
                lane = MeshLane(mesh.url, f"http://{address}", http)
                lane.mesh = mesh
                await eventually(lambda: _reaches(lane), SECONDS, "no request comes through the lane")
                yield lane


class MeshLane(Lane):
    """A lane before a `weft up`."""

    mesh: MeshProcess


async def _reaches(lane: Lane) -> bool | None:
    """Whether the picker knows where the runners take requests: until then they go to the gateway."""
    request_id = lane.new_id()
    # One token: an answer of a slow engine through the gateway may take longer than there is time.
    status, _, _ = await lane.ask(lane.body(max_tokens=1), request_id)
    return True if status == 200 and await lane.figure('weft_picker_requests_total{result="lane"') else None


class LaneApart:
    """A mesh as processes of their own, the picker's among them, and an Envoy before it."""

    def __init__(self, mesh: Apart, registry: str, address: str, picker: int, pools: Sequence[str]) -> None:
        self.mesh = mesh
        self._looked_at = MeshProcess(mesh.home, cast("Any", None))
        self._looked_at.facts = {"grpc": registry}
        self.url = f"http://{address}"
        self.pools = pools
        self._picker = picker
        self._pid = 0
        self._count = 0

    def start_picker(self) -> None:
        self.mesh.start("picker", "--listen", f"127.0.0.1:{self._picker}", "--health", f"127.0.0.1:{free_port()}")
        self._pid = int(self.mesh.pid("picker"))

    async def end(self, service: str, number: signal.Signals) -> None:
        await asyncio.to_thread(self.mesh.end, service, number)

    async def start(self, service: str) -> None:
        """Start the picker, or the runner of this name."""
        if service == "picker":
            await asyncio.to_thread(self.start_picker)
        else:
            await asyncio.to_thread(self.mesh.start, "runner", "--runner", service, name=service)

    @contextmanager
    def frozen_picker(self) -> Iterator[None]:
        os.kill(self._pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._pid, signal.SIGCONT)

    async def engine(self, runner: str) -> FakeControl:
        """The engine of a runner."""
        return await self._looked_at.backend(runner)

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[Lane]:
        """A client of it, once every pool answers through the lane; ids go on from test to test."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            lane = Lane(self.mesh.url, self.url, http)
            lane._count = self._count
            await self.until_placed(lane)
            yield lane
            self._count = lane._count

    async def until_placed(self, lane: Lane) -> None:
        """Return once a request for each pool has come through the lane."""

        for pool in self.pools:
            await eventually(partial(self._reaches, lane, pool), SECONDS, f"nothing for {pool} comes through the lane")

    async def _reaches(self, lane: Lane, pool: str) -> bool:
        request_id = lane.new_id()
        status, _, _ = await lane.ask(lane.body(max_tokens=1) | {"model": pool}, request_id)
        return status == 200 and f'"request_id":"{request_id}"' not in self._gateway_log()

    def _gateway_log(self) -> str:
        return (self.mesh.home / "logs" / "gateway.log").read_text().replace('": "', '":"')


@contextmanager
def lane_apart(folder: Path, *runners: dict[str, Any], **sections: Any) -> Iterator[LaneApart]:
    """These runners with registry, picker, gateway and Envoy; every process ends with exit code 0."""
    picker, gateway = free_port(), free_port()
    lane = {"listen": f"127.0.0.1:{picker}", "gateway": f"127.0.0.1:{gateway}"}
    given = {"port": gateway, "picker": lane, "registry": {"report_interval_seconds": 0.2}, "router": QUICK}
    config = write_config(folder, *runners, **(given | sections))
    mesh = Apart(folder / "home", config)
    try:
        registry = mesh.start("registry")
        with running_envoy(lane_document(config, picker, gateway, runners), folder) as address:
            pools = [each["models"][0]["pool"] for each in runners]
            apart = LaneApart(mesh, registry, address, picker, list(dict.fromkeys(pools)))
            apart.start_picker()
            for each in runners:
                mesh.start("runner", "--runner", each["name"], name=each["name"])
            mesh.url = mesh.start("gateway")
            yield apart
    finally:
        codes = mesh.end_all()
    assert set(codes) == {0}
