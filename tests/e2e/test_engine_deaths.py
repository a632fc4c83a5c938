"""An engine that dies is news: in events, in describe, in doctor, and to whoever asked it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from chats import chat
from mesh_process import MeshProcess, eventually, fake_runner, run_weft, running_mesh, write_config

from weft.api.registry.v1 import runner_pb2

CAUSE = "before its first answer: weft_testing.fake_backend was probably built for another processor"
DEATHS_BEFORE = 1
"""The test whether it continues restored prompts ends such an engine too, at its first start only."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("deaths")
    foreign = fake_runner("foreign", pool="other", crash_after_tokens=0, crash_signal="SIGSEGV")
    starved = fake_runner("starved", pool="hungry", out_of_memory_after_tokens=0)
    config = write_config(folder, fake_runner("a"), foreign, starved)
    with running_mesh(folder / "home", "--config", str(config)) as running:
        yield running


async def _events(mesh: MeshProcess, model: str) -> list[tuple[str, str]]:
    out = await mesh.weft("events", "model", model, "-o", "json")
    return [(event["reason"], event["message"]) for event in json.loads(out)["items"]]


async def _is_ready(mesh: MeshProcess, runner: str, fault_count: int) -> bool:
    for known in await mesh.runners():
        if known.name == runner:
            (instance,) = known.capability.instances
            return instance.phase == runner_pb2.InstanceState.PHASE_READY and instance.fault_count == fault_count
    return False


async def test_engine_death_emits_an_event_before_the_next_ready(mesh: MeshProcess) -> None:
    await eventually(lambda: _is_ready(mesh, "a", 0), 20.0, "not ready")
    before = len(await _events(mesh, "m-a"))
    os.kill((await mesh.describe("a")).process_id, signal.SIGKILL)
    await eventually(lambda: _is_ready(mesh, "a", 1), 20.0, "not ready again")
    assert (await _events(mesh, "m-a"))[before:] == [
        ("died", "signal SIGKILL (restart 1)"),
        ("ready", "its engine takes requests"),
    ]
    _, described, _ = await run_weft("describe", "model", "m-a", home=mesh.home)
    assert "signal SIGKILL (restart 1)" in described
    assert "Last restart reason: signal SIGKILL" in described


async def test_out_of_memory_death_is_reported_in_its_event(mesh: MeshProcess) -> None:
    await eventually(lambda: _is_ready(mesh, "starved", DEATHS_BEFORE), 20.0, "not ready")
    status, answer = await chat(mesh.url, "m-starved")
    assert (status, "out_of_memory" in str(answer)) == (503, True)
    died = [message for reason, message in await _events(mesh, "m-starved") if reason == "died"]
    assert died
    assert all("signal SIGABRT" in message and "it ran out of memory;" in message for message in died)


async def test_engine_built_for_another_cpu_is_reported_on_every_surface(mesh: MeshProcess) -> None:
    await eventually(lambda: _is_ready(mesh, "foreign", DEATHS_BEFORE), 20.0, "not ready")
    _, answer = await chat(mesh.url, "m-foreign")
    assert CAUSE in answer["error"]["message"]
    assert "-DGGML_NATIVE=OFF" in answer["error"]["message"]
    died = [message for reason, message in await _events(mesh, "m-foreign") if reason == "died"]
    assert died
    assert all(message.startswith(f"signal SIGSEGV {CAUSE}") for message in died)
    for command in (("describe", "model", "m-foreign"), ("doctor", "--config", str(_config(mesh)))):
        _, out, _ = await run_weft(*command, "-o", "json", home=mesh.home)
        assert CAUSE in out, command


def _config(mesh: MeshProcess) -> Path:
    return mesh.home.parent / "weft.yaml"
