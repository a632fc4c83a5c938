"""A request's share of device time and energy on a real GPU of NVIDIA, with a program that keeps it busy as the engine.

Needs a driver (libcuda, libnvidia-ml), a GPU that nothing else uses, and processes that the driver can identify: not a
container with process ids of its own.
"""

import asyncio
import ctypes
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from runner_svc.memory.device_meter import DeviceMeter, DeviceSampler, RequestMeter
from runner_svc.runner_settings import DEFAULT_DEVICE_SAMPLE_SECONDS
from weft.api.common.v1.receipt_pb2 import DeviceUsage
from weft.api.registry.v1.lease_pb2 import DeviceBytes, Lease
from weft.gpu.nvml import Health, read_within
from weft.gpu.observer import HostObserver
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import ProcessId
from weft.kernel.time.clock import SystemClock

READ_SECONDS = 10.0
WORK_SECONDS = 6.0
MEBIBYTE = 1024**2

_BUSY = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def ask(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    assert status == 0, (name, status)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
ask("cuInit", 0)
ask("cuDeviceGet", ctypes.byref(device), 0)
ask("cuCtxCreate_v2", ctypes.byref(context), 0, device)
ask("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(256 * 1024**2))
print("ready", flush=True)
works = sys.argv[1] == "busy"
if not works:
    sys.stdin.read()
while works:
    for _ in range(64):
        ask("cuMemsetD32_v2", memory, 1, ctypes.c_size_t(64 * 1024**2))
    ask("cuCtxSynchronize")
"""


def _has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    reading = read_within(READ_SECONDS)
    return reading is not None and reading.health is Health.WELL and bool(reading.devices)


pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(300)]
if not _has_gpu():
    pytestmark.append(pytest.mark.skip(reason="needs a GPU of NVIDIA with its driver"))


@contextmanager
def _program(kind: str) -> Iterator[ProcessId]:
    """A program that holds memory of the first GPU, and computes on it where `kind` is `busy`."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _BUSY, kind], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = process_id_of(process.pid)
            assert found is not None
            yield found
        finally:
            process.kill()


@asynccontextmanager
async def _sampled(engine: ProcessId) -> AsyncIterator[DeviceMeter]:
    clock = SystemClock()
    meter = DeviceMeter(clock)
    sampler = DeviceSampler(HostObserver(), meter, lambda: {"tiny": (engine,)}, clock, DEFAULT_DEVICE_SAMPLE_SECONDS)
    await sampler.start()
    try:
        yield meter
    finally:
        await sampler.stop()


def _request(meter: DeviceMeter) -> RequestMeter:
    grant = Lease(lease_id="a", shares=[DeviceBytes(device_index=0, bytes=256 * MEBIBYTE)])
    return RequestMeter(meter, "tiny", lambda: grant)


async def test_two_requests_of_a_busy_engine_share_its_gpu_time() -> None:
    with _program("busy") as engine:
        async with _sampled(engine) as meter:
            requests = [_request(meter), _request(meter)]
            began = time.monotonic()
            with requests[0], requests[1]:
                await asyncio.sleep(WORK_SECONDS)
            took = time.monotonic() - began
            usages = [request.usage() for request in requests]
            samples = meter.samples(0)
    found = [usage for usage in usages if usage is not None]
    assert [usage.gap for usage in found] == [DeviceUsage.GAP_UNSPECIFIED] * 2
    seconds = [usage.device_time.ToNanoseconds() / 1e9 for usage in found]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05)
    assert 0.7 * took < sum(seconds) <= took, "it computed all the time, and no more than that"
    first, last = samples[0].energy_millijoules, samples[-1].energy_millijoules
    if first is not None and last is not None:
        assert 0 < sum(usage.energy_millijoules for usage in found) <= last - first


async def test_foreign_gpu_process_makes_the_share_unknown() -> None:
    with _program("busy") as engine, _program("idle"):
        async with _sampled(engine) as meter:
            request = _request(meter)
            with request:
                await asyncio.sleep(WORK_SECONDS)
            usage = request.usage()
    assert usage is not None
    assert usage.gap == DeviceUsage.GAP_FOREIGN_PROCESS
    assert not usage.HasField("device_time")
