"""A mesh with every kind of end and wait in it, for those who look at its metrics."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from boards import BOARDS
from kit.counting_provider import counting_provider
from kit.otlp_receiver import running_receiver
from kit.quick_weft import within
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.registry.v1 import model_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.kernel.channels.rpc import open_channel
from weft_testing.carried import CarriedStub
from weft_testing.certificates import Authority
from weft_testing.fake_backend.dialect import Dialect
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.free_port import free_ports

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
POOL, FIRST, SECOND, BROKEN, AWAY, TELLING = "pair", "first", "second", "broken", "away", "telling"
SGLANG = Dialect(
    owned_by="sglang",
    lacks=("/props", "/slots", "/apply-template"),
    metrics=("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
)
"""An engine that tells how full its KV cache is."""
KEY_VARIABLE = "OBSERVED_KEY"
BUDGET = {"declared": [{"name": "budget", "memory_mb": 3000}]}
MODEL_MB = 2000
DEADLINE_SECONDS = 20.0
HELD_AND_WAITING = 4
"""Two requests that hold the slots of the pool, and two that wait, as many as may."""


ONLY_MEASURED = 'weft_ledger_device_bytes{kind="foreign"}'
"""Asked of real devices alone: what a declared one holds cannot be seen."""


def asked_expressions() -> list[str]:
    """The PromQL of every panel and every alert."""
    (group,) = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text("utf-8"))["groups"]
    panels = [panel for board in BOARDS for panel in board.panels]
    expressions = [query.expression for panel in panels for query in panel.queries]
    expressions += [rule["expr"] for rule in group["rules"]]
    return [expression for expression in expressions if ONLY_MEASURED not in expression]


@dataclass(frozen=True, slots=True)
class Observed:
    """The mesh, and the port on which the provider of `away` is to listen."""

    mesh: MeshProcess
    provider_port: int


@contextmanager
def running_observed(folder: Path) -> Iterator[Observed]:
    """The mesh, which sends its spans to a collector.

    `first` and `second` have memory for one of them, `broken` dies when it is loaded, `away` is a provider's model, and
    `pair` a pool of two runners with one slot each.
    """
    # Waiting requests are told once per second that their model loads.
    box = fake_runner("box", pool="", load_seconds=1.5)
    sleeping = {"path": __file__, "slots": 2, "memory_mb": MODEL_MB}
    box["models"] = [{"name": FIRST, **sleeping}, {"name": SECOND, **sleeping, "start_asleep": True}]
    dying = fake_runner("dying", pool="", exit_at_start=3)
    dying["models"] = [{"name": BROKEN, "path": __file__, "slots": 1, "memory_mb": 10, "start_asleep": True}]
    port = free_ports(1)
    provider = {"name": AWAY, "url": f"http://127.0.0.1:{port}/v7", "upstream_model": "frontier", "slots": 2}
    remote = {"name": "remote", "runtime": "openai_remote", "models": [{**provider, "api_key_env": KEY_VARIABLE}]}
    pair = [fake_runner(name, pool=POOL, slots=1) for name in ("a", "b")]
    telling = fake_backend_command(
        "--port", "{port}", "--alias", "{name}", "--parallel", "{slots}", "--speaks-vllm", dialect=SGLANG
    )
    telling_model = {"name": TELLING, "preset": "sglang", "model": "weights", "slots": 1, "command": telling}
    server = {"name": "server", "runtime": "server", "models": [telling_model]}
    router = {"queue_depth_per_runner": 1}
    metrics = {"tenants": ["default"]}
    runners = (box, dying, remote, server, *pair)
    certificate = Authority().issue("localhost").write(folder)
    # No relay listens; its certificate is watched all the same.
    relay = {"certificate_file": str(certificate.certificate_file), "key_file": str(certificate.key_file)}
    config = write_config(folder, *runners, accelerators=BUDGET, router=router, metrics=metrics, relay=relay)
    quick = within({"router_svc.durable.limits:TaskLimits": {"sweep_interval_seconds": 0.5}})
    with running_receiver() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        environment.setenv(KEY_VARIABLE, "sk-observed")
        with running_mesh(folder / "home", "--config", str(config), within=quick) as mesh:
            yield Observed(mesh, port)


async def live_through(observed: Observed) -> None:
    """Has requests end in every way that the metrics tell apart."""
    mesh = observed.mesh
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS)) as http:
        for model in (FIRST, SECOND, FIRST):
            assert (await _ask(http, mesh, model, stream=True))[0] == 200
        assert (await _ask(http, mesh, BROKEN))[0] >= 500
        assert (await _ask(http, mesh, "nobody"))[0] == 404
        async with counting_provider(port=observed.provider_port):
            status, answer = await _ask(http, mesh, AWAY, allow_remote=True)
        assert status == 200, answer
        task = {"model": BROKEN, "body": {"messages": [{"role": "user", "content": "hi"}]}}
        async with http.post(f"{mesh.url}/api/v1/inference-tasks", json=task) as accepted:
            assert accepted.status == 202, await accepted.text()
        await _fail_before_content(http, mesh)
        await _cut_off(http, mesh)
        await _fill_the_queue(http, mesh)
        await _tell_of_the_cache(http, mesh)
    await _vanish_with_a_slot(mesh)


async def _ask(http: aiohttp.ClientSession, mesh: MeshProcess, model: str, **fields: Any) -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}
    async with http.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.text()


async def _fail_before_content(http: aiohttp.ClientSession, mesh: MeshProcess) -> None:
    """A runner refuses its request, which the other one answers; then both refuse."""
    for name in ("a", "b"):
        async with await mesh.backend(name) as backend:
            await backend.set_behaviour(status=500)
    assert (await _ask(http, mesh, POOL))[0] >= 500
    await mesh.reset("a", "b")


async def _cut_off(http: aiohttp.ClientSession, mesh: MeshProcess) -> None:
    """A server closes its connection in the middle of an answer."""
    for name in ("a", "b"):
        async with await mesh.backend(name) as backend:
            await backend.set_behaviour(close_after_tokens=2, tokens_per_second=50)
    status, answer = await _ask(http, mesh, POOL, stream=True, max_tokens=20)
    assert (status, "error" in answer) == (200, True)
    await mesh.reset("a", "b")


async def _fill_the_queue(http: aiohttp.ClientSession, mesh: MeshProcess) -> None:
    """Both slots are held, two requests wait, and the next one is refused. Who waits is shown for how long."""
    for _ in range(2):
        # How quick the models are is known from these.
        assert (await _ask(http, mesh, POOL))[0] == 200
    for name in ("a", "b"):
        async with await mesh.backend(name) as backend:
            await backend.set_behaviour(prefill_held=True)
    asked = [asyncio.create_task(_ask(http, mesh, POOL)) for _ in range(HELD_AND_WAITING + 1)]
    done, _ = await asyncio.wait(asked, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result()[0] for task in done} == {503}
    await mesh.reset("a", "b")
    await asyncio.gather(*asked)


async def _tell_of_the_cache(http: aiohttp.ClientSession, mesh: MeshProcess) -> None:
    """A request works until the runner has read the page of its engine."""
    async with await mesh.backend("server") as backend:
        await backend.set_behaviour(prefill_held=True)
        asked = asyncio.create_task(_ask(http, mesh, TELLING))
        await eventually(lambda: _shows_cache(http, mesh), DEADLINE_SECONDS, "no runner has read its engine's page")
        await backend.set_behaviour(prefill_held=False)
        assert (await asked)[0] == 200


async def _shows_cache(http: aiohttp.ClientSession, mesh: MeshProcess) -> bool:
    """Whether the page has what engines say of themselves while they work."""
    async with http.get(f"{mesh.url}/metrics") as answer:
        return "\nweft_runner_kv_cache_share{" in await answer.text()


async def _vanish_with_a_slot(mesh: MeshProcess) -> None:
    """A dispatcher gets a slot, and its stream is closed without a word on how the request ended."""
    async with open_channel(mesh.grpc) as channel:
        opening = pb.PlaceOpen(
            request_id="vanished", tenant="default", model=FIRST, operation=model_pb2.MODEL_OPERATION_CHAT
        )
        call = CarriedStub(channel, pb).Place(pb.PlaceRequest(open=opening), timeout=DEADLINE_SECONDS)
        async for response in call:
            if response.HasField("granted"):
                break
        call.cancel()
