"""Options of one load at real processes: devices, ports, and the reported values."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.engines import fake_engine, started_process
from kit.failures import fails
from kit.own_children import own_children
from kit.tiny_gguf import write_gguf

from runner_svc.backend.engine_process import EnginePorts, PortRange
from runner_svc.backend.port import LoadOrder
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.kernel.errors.reasons import Reason
from weft_testing.free_port import free_ports

# Says that the port is somebody else's and ends, as llama.cpp's server does, for as many starts as the file has bytes;
# afterwards it is the fake.
LOSES_RACES = """
import os, pathlib, sys
races = pathlib.Path(sys.argv[1])
if races.stat().st_size:
    races.write_bytes(races.read_bytes()[1:])
    port = sys.argv[sys.argv.index("--port") + 1]
    print(f"E start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: {port}", flush=True)
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "weft_testing.fake_backend", *sys.argv[2:]])
"""


def _backend(switches: dict[str, Any] | None = None, **settings: Any) -> LlamaServerBackend:
    return fake_engine(switches, load_stall_seconds=10.0, **settings)


def _ports(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}


def _free_ports(count: int) -> PortRange:
    first = free_ports(count)
    return PortRange(first=first, last=first + count - 1)


@pytest.mark.slow("starts an ordinary program")
@pytest.mark.usefixtures("cold_engines")
async def test_engine_sees_only_the_devices_of_its_shares() -> None:
    shares = (DeviceBytes(device_index=2, bytes=3 * 2**30), DeviceBytes(device_index=5, bytes=2**30))
    order = LoadOrder(shares=shares, hides_devices=True, parameters={"flash_attention": "on"})
    async with started_process(_backend(), order) as (_, process):
        environment, line = process.environ(), process.cmdline()
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert line[line.index("--tensor-split") + 1] == "3072,1024"
    assert line[line.index("--split-mode") + 1] == "layer"
    assert line[line.index("--flash-attn") + 1] == "on"


async def test_effective_slots_and_context_come_from_the_server() -> None:
    backend = _backend(slots=4, context_tokens=2048)
    async with started_process(backend, LoadOrder(parameters={"slots": 2, "context_tokens": 768})) as (facts, _):
        assert (facts.slots, facts.context_tokens) == (2, 768)
    # A flag of the configuration changes the context behind our back; the facts are the server's all the same.
    stretched = _backend(slots=2, context_tokens=2048, extra_arguments=("--ctx-size", "1024"))
    async with started_process(stretched) as (facts, _):
        assert (facts.slots, facts.context_tokens) == (2, 512)


async def test_variant_is_checked_before_load_like_the_configured_file(tmp_path: Path) -> None:
    poisoned = write_gguf(tmp_path / "poisoned.gguf", "{% for a in range(999999999) %}{{ a }}{% endfor %}")
    backend = _backend()
    children = own_children()
    with fails(Reason.TEMPLATE_FAILED):
        await backend.start(LoadOrder(model_path=poisoned))
    assert own_children() == children
    async with started_process(backend) as (facts, _):
        assert facts.context_tokens == 2048


async def test_engines_of_one_runner_share_a_port_range() -> None:
    ports_range = _free_ports(2)
    ports = EnginePorts(ports_range)
    first, second, third = (_backend(ports=ports) for _ in range(3))
    async with asyncio.timeout(30.0):
        await asyncio.gather(first.start(), second.start())
    try:
        used = {port for one in (first, second) for port in _ports(psutil.Process(one.process_id))}
        assert used == {ports_range.first, ports_range.last}
        with fails(Reason.CONNECT_FAILED) as none_left:
            await third.start()
        assert "port_range" in none_left.value.message
        await first.stop()
        async with started_process(third) as (_, process):
            assert _ports(process) < {ports_range.first, ports_range.last}
    finally:
        await first.stop()
        await second.stop()


async def test_port_lost_to_a_race_is_retried(tmp_path: Path) -> None:
    races = tmp_path / "races"
    races.write_bytes(b"xx")
    ports_range = _free_ports(4)
    command = (sys.executable, "-c", LOSES_RACES, str(races))
    async with started_process(_backend(command=command, ports=EnginePorts(ports_range))) as (_, process):
        assert _ports(process) == {ports_range.first + 2}


async def test_port_race_retries_are_bounded_and_leave_neither_process_nor_port(tmp_path: Path) -> None:
    races = tmp_path / "races"
    races.write_bytes(b"x" * 1000)
    ports_range = _free_ports(3)
    ports = EnginePorts(ports_range)
    command = (sys.executable, "-c", LOSES_RACES, str(races))
    children = own_children()
    with fails(Reason.CONNECT_FAILED):
        await _backend(command=command, ports=ports).start()
    assert races.stat().st_size == 1000 - 3
    assert own_children() == children
    assert ports.take() == ports_range.first


@pytest.mark.parametrize(
    "words", ["error: invalid argument: --spec-type", "x: error: unrecognized arguments: --spec-type a"]
)
async def test_parameter_unknown_to_an_older_server_is_rejected_by_name(words: str) -> None:
    older = "import sys; print(sys.argv[1], file=sys.stderr); sys.exit('--spec-type' in sys.argv)"
    backend = _backend(command=(sys.executable, "-c", older, words))
    with fails(field="parameters.spec_type"):
        await backend.start(LoadOrder(parameters={"spec_type": "ngram-simple"}))
    # The flag is not the load's: that the server does not start is nobody's order.
    with fails(Reason.SERVER_DIED):
        await backend.start(LoadOrder(parameters={"slots": 1}))
