"""Accelerator memory for programs other than runners, such as training jobs.

from weft.client.leases import hold_memory

with hold_memory("8GiB", purpose="training") as lease:
    os.environ.update(lease.environment())
    for batch in batches:
        lease.check()
        ...

During the block, no other program of the mesh gets that memory. A daemon thread renews the lease. Start programs that
fork during the block (without exec) with `weft mesh lease acquire` instead: the thread and its connection do not
survive a fork.
"""

import getpass
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client._home import mesh_address
from weft.client._lease_renewal import LeaseClient, LeaseManager, ProcessTree
from weft.gpu.observer import HostObserver
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import MAX_DEVICES, ProcessId, Source, device_from, snapshot_message
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import REGISTRY_AWAY, Reason
from weft.kernel.requests.request_values import CALLER_CLASSES
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.values.names import MAX_NAME_CHARS, new_id
from weft.kernel.values.units import parse_size

MAX_PURPOSE_CHARS = 256
MAX_CALL_WAIT_SECONDS = 300.0
"""The ledger's limit for one wait. A longer wait consists of several, each starting at the end of the queue."""
MAX_WAIT_SECONDS = 7 * 86_400.0
DEFAULT_WAIT_SECONDS = 300.0
RETRY_SECONDS = 1.0
"""Pause before retrying if the mesh does not answer."""
CHILD_WAIT_SECONDS = 10.0
"""Maximum wait at the end of the block for processes that were started in it; see `hold_memory`."""
CHILD_POLL_SECONDS = 0.05
_PRIORITIES = {band.name.lower(): band.wire for band in CALLER_CLASSES}
_INVALID_NAME_CHARS = re.compile(r"[^A-Za-z0-9._:-]+")


class LeaseOptions(TypedDict, total=False):
    """Options of a lease."""

    purpose: str
    """Purpose, shown to programs that wait for the memory; default: `name`."""
    devices: Sequence[int]
    """Allowed devices, by their numbers on the host; default: any."""
    max_devices: int
    """Maximum number of devices to split it over; default: any. A single device is preferred."""
    priority: str
    """Idle models of a higher priority are not evicted: low, normal or high. Default: normal."""
    wait_seconds: float
    """Maximum wait for the memory; default: DEFAULT_WAIT_SECONDS."""
    on_waiting: Callable[[str], None]
    """Called with the current reason for waiting, whenever it changes."""
    on_lost: Callable[[], None]
    """Called once, in another thread, when the lease is lost."""
    name: str
    """Name of the program; default: its file name and the user."""
    observer: HostObserver
    """Observer of the devices; default: those declared to the ledger, otherwise NVIDIA's library."""


class MemoryLease:
    """A held lease. Leave the block of `hold_memory` to release it."""

    def __init__(self, lease: lease_pb2.Lease, keeper: LeaseManager, tree: ProcessTree, *, hides_devices: bool) -> None:
        self._lease = lease
        self._keeper = keeper
        self._tree = tree
        self._hides_devices = hides_devices

    @property
    def id(self) -> str:
        """The lease id."""
        return self._lease.lease_id

    @property
    def fencing_number(self) -> int:
        """Increases with every lease of the mesh; of two holders, the one with the lower number is stale."""
        return self._lease.fencing_number

    @property
    def host(self) -> str:
        """The host of the memory."""
        return self._lease.host

    @property
    def shares(self) -> dict[int, int]:
        """Bytes by device number on the host."""
        return {share.device_index: share.bytes for share in self._lease.shares}

    @property
    def devices(self) -> list[int]:
        """The device numbers on the host, in the order of the PCI bus."""
        return sorted(self.shares)

    @property
    def is_lost(self) -> bool:
        """Whether the lease was lost, so that the memory may belong to another holder."""
        return self._keeper.lost.is_set()

    def check(self) -> None:
        """Raises LEASE_LOST if the lease was lost; free the memory immediately."""
        if self.is_lost:
            raise WeftError(
                Reason.LEASE_LOST, f"the lease {self.id} is lost: its memory may belong to another holder; free it"
            )

    def environment(self) -> dict[str, str]:
        """Returns environment variables that limit CUDA programs to these devices; none for declared devices."""
        if not self._hides_devices:
            return {}
        visible = ",".join(map(str, self.devices))
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}

    def held_by(self, pid: int) -> None:
        """Declares that a process and its descendants use the memory. Returns once the ledger knows.

        Raises LEASE_LOST, and SERVICE_UNAVAILABLE if the ledger does not answer.
        """
        process = process_id_of(pid)
        if process is not None:
            self._tree.begin(process)
            self._keeper.confirm()
        self.check()

    def processes(self) -> tuple[ProcessId, ...]:
        """Returns the processes that may hold the memory."""
        return self._tree.living()


@contextmanager
def hold_memory(
    memory: str | int,
    *,
    home: Path | str | None = None,
    target: str | None = None,
    **options: Unpack[LeaseOptions],
) -> Iterator[MemoryLease]:
    """Holds accelerator memory of this host during a block: "8GiB" or a number of bytes, over all devices together.

    Waits for the memory. `target` is the registry's gRPC address; default: the mesh on `home`. At the end of the block
    it waits up to CHILD_WAIT_SECONDS for processes that were started in it, then releases the lease. The ledger keeps
    the reservation until this process and those started in the block have ended or hold no memory. Frameworks cache
    memory, so a program that continues afterwards should do the work in a child process.

    Raises INVALID_ARGUMENT, NOT_FOUND if this host has no devices, INSUFFICIENT_MEMORY if the amount is too large or
    did not become free in time, SERVICE_UNAVAILABLE if no mesh answers.
    """
    process = process_id_of(os.getpid())
    before = frozenset(ProcessTree(process).living())
    tree = ProcessTree(process)
    with acquired_lease(
        parse_size(str(memory), "memory"), tree, target or mesh_address(home, "registry"), options
    ) as lease:
        try:
            yield lease
        finally:
            _wait_for_children(tree, before)


@contextmanager
def acquired_lease(amount: int, tree: ProcessTree, target: str, options: LeaseOptions) -> Iterator[MemoryLease]:
    """As `hold_memory`, for the processes of `tree`; reports those that still run at the end to the ledger."""
    name = options.get("name") or program_name(sys.argv[0])
    request = _request(amount, options, name)
    holder = lease_pb2.LeaseHolder(kind=lease_pb2.LeaseHolder.KIND_PROGRAM, name=name, incarnation=new_id("life"))
    calls = LeaseClient(target, holder)
    try:
        observer = options.get("observer") or observer_of_this_host(calls)
        keeper = LeaseManager(calls, observer, tree.living, options.get("on_lost") or (lambda: None))
        keeper.start()
        try:
            granted = _LeaseWait(calls, observer, keeper, options).wait(request)
            is_real = observer.look_blocking().source is not Source.DECLARED
            yield MemoryLease(granted, keeper, tree, hides_devices=is_real)
        finally:
            keeper.give_up()
    finally:
        calls.close()


def observer_of_this_host(calls: LeaseClient) -> HostObserver:
    """Returns an observer of the devices declared to the ledger, or of NVIDIA's library if there are none."""
    observer = HostObserver()
    for known in calls.hosts(observer.host):
        if known.host == observer.host and known.source == lease_pb2.HostSighting.SOURCE_DECLARED:
            for memory in known.devices:
                check_message(memory.device, "hosts.devices")
            return HostObserver(declared=tuple(device_from(memory.device) for memory in known.devices))
    return observer


def program_name(program: str) -> str:
    """Returns a name for a lease holder: the program's file name and the user."""
    stem = _INVALID_NAME_CHARS.sub("-", Path(program).name).strip("-._:") or "program"
    try:
        user = _INVALID_NAME_CHARS.sub("-", getpass.getuser())
    except (OSError, KeyError):
        user = str(os.getpid())
    return f"{stem[: MAX_NAME_CHARS // 2]}-{user}"[:MAX_NAME_CHARS]


class _LeaseWait:
    """A wait for memory, repeated if it is longer than the ledger's limit for one wait."""

    def __init__(self, calls: LeaseClient, observer: HostObserver, keeper: LeaseManager, options: LeaseOptions) -> None:
        self._calls = calls
        self._observer = observer
        self._keeper = keeper
        self._on_waiting = options.get("on_waiting") or (lambda _: None)
        self._deadline = time.monotonic() + options.get("wait_seconds", DEFAULT_WAIT_SECONDS)
        self._last_status = ""
        self._has_waited = False
        self._call_has_waited = False

    def wait(self, request: lease_service_pb2.AcquireLeaseRequest) -> lease_pb2.Lease:
        """Returns the lease after its first renewal. Raises as `hold_memory`."""
        while True:
            try:
                return self._acquire(request)
            except WeftError as error:
                if not self._is_retryable(error):
                    raise
                if error.reason in REGISTRY_AWAY:
                    self._report(f"{error.message}; trying again")
                    time.sleep(RETRY_SECONDS)
                else:
                    request.request_id = new_id("lease")

    def _is_retryable(self, error: WeftError) -> bool:
        """Whether to wait again: a refusal without a wait is final, one after a wait is the ledger's time limit."""
        is_limit = error.reason is Reason.INSUFFICIENT_MEMORY and self._call_has_waited
        is_away = error.reason in REGISTRY_AWAY and self._has_waited
        return (is_limit or is_away) and time.monotonic() + RETRY_SECONDS < self._deadline

    def _acquire(self, request: lease_service_pb2.AcquireLeaseRequest) -> lease_pb2.Lease:
        sight = self._observer.look_blocking(fresh=True)
        if not sight.devices:
            raise WeftError(
                Reason.NOT_FOUND,
                f"the host {sight.host} has no accelerator that can be seen; other makers' cards are declared in "
                "weft.yaml (accelerators.declared), and known once a runner of that host is up",
            )
        request.sighting.CopyFrom(snapshot_message(sight))
        left = max(0.0, self._deadline - time.monotonic())
        self._call_has_waited = False
        lease: lease_pb2.Lease | None = None
        # Read all responses: leaving the call between the grant and the first renewal releases the lease.
        for response in self._calls.acquire(request, min(left, MAX_CALL_WAIT_SECONDS)):
            if response.HasField("granted"):
                lease = response.granted.lease
                self._keeper.adopt(response.granted)
            elif response.HasField("waiting"):
                self._keeper.hurry()  # the ledger now wants reports more often
                self._has_waited = self._call_has_waited = True
                self._report(response.waiting.detail)
        if lease is None:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the ledger ended the call without an answer")
        return lease

    def _report(self, status: str) -> None:
        if status != self._last_status:
            self._last_status = status
            self._on_waiting(status)


def _request(amount: int, options: LeaseOptions, name: str) -> lease_service_pb2.AcquireLeaseRequest:
    purpose, priority = options.get("purpose") or name, options.get("priority", "normal").lower()
    devices, max_devices = options.get("devices", ()), options.get("max_devices", 0)
    if len(purpose) > MAX_PURPOSE_CHARS:
        raise invalid_field("purpose", f"must be at most {MAX_PURPOSE_CHARS} characters")
    if priority not in _PRIORITIES:
        raise invalid_field("priority", f"must be one of {', '.join(_PRIORITIES)}")
    if any(not 0 <= index < MAX_DEVICES for index in devices) or len(set(devices)) < len(devices):
        raise invalid_field("devices", f"must be different numbers of devices, each 0 to {MAX_DEVICES - 1}")
    if not 0 <= max_devices <= MAX_DEVICES:
        raise invalid_field("max_devices", f"must be 1 to {MAX_DEVICES}, or 0 for as many as it takes")
    if not 0 <= options.get("wait_seconds", DEFAULT_WAIT_SECONDS) <= MAX_WAIT_SECONDS:
        raise invalid_field("wait_seconds", f"must be 0 to {MAX_WAIT_SECONDS:.0f} seconds")
    return lease_service_pb2.AcquireLeaseRequest(
        request_id=new_id("lease"),
        purpose=purpose,
        bytes=amount,
        device_indexes=sorted(devices),
        max_devices=max_devices,
        priority=priority_pb2.Priority.ValueType(_PRIORITIES[priority]),
    )


def _wait_for_children(tree: ProcessTree, before: frozenset[ProcessId]) -> None:
    """Waits at most CHILD_WAIT_SECONDS for processes that are not in `before`."""
    deadline = time.monotonic() + CHILD_WAIT_SECONDS
    while set(tree.living()) - before and time.monotonic() < deadline:
        time.sleep(CHILD_POLL_SECONDS)
