"""The memory of this machine that sizes models without configuration."""

import asyncio
from typing import TYPE_CHECKING

from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.model_sizing import MachineMemory
from weft.kernel.machine.machine_limits import UsableMemory, usable_memory

if TYPE_CHECKING:
    from runner_svc.memory.lease_manager import LeaseManager

HOST_RESERVE_SHARE = 0.05
"""Share of host memory left free by sizing: the mesh itself takes some, and other programs grow."""
MIN_HOST_RESERVE_BYTES = 512 * MEBIBYTE


def host_memory_bytes(usable: UsableMemory | None = None) -> int:
    """Returns the host memory that another model may take.

    This is the available memory (`usable`; None: read) minus a reserve, because no ledger evicts anything from it.
    """
    usable = usable or usable_memory()
    return max(0, usable.available_bytes - _reserve(usable))


def engine_memory_bytes() -> int:
    """Returns the maximum host memory for all engines together."""
    usable = usable_memory()
    return max(0, usable.total_bytes - _reserve(usable))


def _reserve(usable: UsableMemory) -> int:
    return max(MIN_HOST_RESERVE_BYTES, int(usable.total_bytes * HOST_RESERVE_SHARE))


async def machine_memory(leases: "LeaseManager | None") -> MachineMemory:
    """Returns the memory for sizing a runner's models; without leases no accelerator counts."""
    devices = () if leases is None else await leases.device_memory()
    return MachineMemory(devices=devices, host_bytes=await asyncio.to_thread(host_memory_bytes))


async def free_memory_bytes(leases: "LeaseManager | None") -> int | None:
    """Returns the memory available to another model without eviction; None: unknown.

    This is memory of the accelerators, or of the host if there are none.
    """
    if leases is not None and await leases.has_devices():
        return await leases.free_device_bytes()
    return await asyncio.to_thread(host_memory_bytes)
