"""Forecast of how a reload would replace changed models (`weft mesh reload --dry-run`)."""

import asyncio
import socket
from typing import Any

import grpc

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.memory.machine_memory import host_memory_bytes
from runner_svc.policy.load_options import AS_CONFIGURED
from runner_svc.policy.replacement import must_drain_first, replacement_words
from runner_svc.runner_config import RunnerConfig
from weft.api.registry.v1 import lease_service_pb2, lease_service_pb2_grpc
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView

TIMEOUT_SECONDS = 5.0
_IN_MEMORY = frozenset({InstanceState.PHASE_LOADING, InstanceState.PHASE_READY, InstanceState.PHASE_DRAINING})


async def replacement_forecast(
    config: RunnerConfig, model: ServedModel, view: FleetView, registry: grpc.aio.Channel
) -> str:
    """Returns a sentence about the order in which the runner would now replace the model, by its own policy."""
    runner = view.runners.get(config.name)
    instance = None if runner is None else runner.instances.get(model.name)
    expected = None if model.hibernation.attached else await model.forecast.expect(AS_CONFIGURED)
    needed = 0 if expected is None else expected.bytes
    free = await _free_bytes(config, registry) if needed else None
    is_loaded = instance is not None and instance.phase in _IN_MEMORY
    drains_first = must_drain_first(is_loaded=is_loaded, needed_bytes=needed, free_bytes=free)
    return replacement_words(model.name, drains_first=drains_first, needed_bytes=needed, free_bytes=free)


async def _free_bytes(config: RunnerConfig, registry: grpc.aio.Channel) -> int | None:
    """Returns the free memory of accelerators or host for another model; None: unknown."""
    stub: Any = lease_service_pb2_grpc.LeaseServiceStub(registry)
    request = lease_service_pb2.ListHostMemoryRequest(host=socket.gethostname())
    try:
        hosts = (await stub.ListHostMemory(request, timeout=TIMEOUT_SECONDS)).hosts
    except grpc.aio.AioRpcError:
        return None
    wanted = config.device_indexes
    accounts: list[lease_service_pb2.DeviceMemory] = [each for host in hosts for each in host.devices]
    if not accounts:
        return await asyncio.to_thread(host_memory_bytes)
    return sum(each.free_bytes for each in accounts if not wanted or each.device.index in wanted)
