"""Renewal of one program's VRAM lease: calls to the ledger, the renewing thread, and the program's process tree."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import grpc
from typing_extensions import override

from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.client._channel import ServiceClient, registry_failure
from weft.gpu.observer import HostObserver
from weft.gpu.process import is_alive, tree_of
from weft.gpu.snapshot import (
    MAX_PROCESSES,
    HostSnapshot,
    ProcessId,
    process_id_from,
    process_id_message,
    snapshot_message,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.time.timestamps import duration_of, optional_seconds, seconds_of

MAX_SEEN_PROCESSES = 4_096
"""Maximum number of tracked processes of a tree; those with the lowest ids are kept."""


class ProcessTree:
    """A process and its running descendants, including known ones with parents that have ended. Thread-safe.

    Descendants that started and lost their parents between two observations are not found.
    """

    def __init__(self, root: ProcessId | None = None) -> None:
        self._lock = threading.Lock()
        self._root = root
        self._seen: set[ProcessId] = set()

    def begin(self, root: ProcessId) -> None:
        """Tracks this process from now on."""
        with self._lock:
            self._root = root
            self._seen.add(root)

    def living(self) -> tuple[ProcessId, ...]:
        """Returns the running processes, the root first."""
        with self._lock:
            found = set(tree_of(self._root)) if self._root is not None else set()
            for process in sorted(self._seen - found):
                if is_alive(process):
                    found.update(tree_of(process))
            self._seen = set(sorted(found)[:MAX_SEEN_PROCESSES])
            return tuple(sorted(self._seen, key=lambda process: (process != self._root, process)))


CALL_TIMEOUT_SECONDS = 10.0
ANSWER_MARGIN_SECONDS = 30.0
"""Added to the maximum wait, for the ledger to report its end."""
MAX_USE_PROCESSES = 256
"""Maximum number of processes of one lease, as in `registry.v1.LeaseUse`."""

pb = lease_service_pb2


class LeaseClient(ServiceClient):
    """Calls on the ledger on behalf of one holder. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, holder: lease_pb2.LeaseHolder) -> None:
        super().__init__(target, CALL_TIMEOUT_SECONDS)
        self._holder = holder
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(self._channel)

    def acquire(self, request: pb.AcquireLeaseRequest, wait_seconds: float) -> Iterator[pb.AcquireLeaseResponse]:
        """Yields the ledger's responses up to the grant, for `wait_seconds` at most. Leaving the iterator cancels."""
        request.holder.CopyFrom(self._holder)
        request.max_wait.CopyFrom(duration_of(wait_seconds))
        return self._stream(self._stub.AcquireLease(request, timeout=wait_seconds + ANSWER_MARGIN_SECONDS))

    def renew(
        self, leases: Iterable[pb.LeaseUse], sight: HostSnapshot, timeout_seconds: float = CALL_TIMEOUT_SECONDS
    ) -> pb.RenewLeasesResponse:
        """Renews leases, if any, and reports the host's snapshot."""
        request = pb.RenewLeasesRequest(holder=self._holder, leases=leases, sighting=snapshot_message(sight))
        response: pb.RenewLeasesResponse = self._call(self._stub.RenewLeases, request, timeout_seconds)
        return response

    def release(self, lease: lease_pb2.Lease) -> None:
        """Releases a lease. Raises LEASE_LOST when its memory was given to another holder."""
        request = pb.ReleaseLeaseRequest(
            holder=self._holder, lease_id=lease.lease_id, fencing_number=lease.fencing_number
        )
        self._call(self._stub.ReleaseLease, request)

    def hosts(self, host: str = "") -> list[pb.HostMemory]:
        """Returns hosts with their devices and leases; with `host` only that one, or none if it is unknown."""
        return list(self._call(self._stub.ListHostMemory, pb.ListHostMemoryRequest(host=host)).hosts)

    @override
    def _failure(self, error: grpc.RpcError) -> WeftError:
        return registry_failure(error, self._target)


def lease_use(lease: lease_pb2.Lease, processes: Iterable[ProcessId]) -> pb.LeaseUse:
    """Returns the use of a lease by a program, which may allocate all of it at any time."""
    return pb.LeaseUse(
        lease_id=lease.lease_id,
        fencing_number=lease.fencing_number,
        processes=[process_id_message(process) for process in list(processes)[:MAX_USE_PROCESSES]],
        priority=lease.priority,
    )


DEFAULT_RENEW_SECONDS = 5.0
"""Interval before the first grant or response."""
MIN_RENEW_SECONDS = 0.1
MIN_ANSWER_SECONDS = 1.0
"""Minimum timeout of an answer, otherwise the renewal interval."""
RETRY_SECONDS = 1.0
"""Pause after a failed renewal."""
CONFIRM_SECONDS = 30.0
"""Time limit for reporting processes to the ledger."""
STOP_SECONDS = 15.0
"""Time limit for stopping the thread: a call and a reading of the host may be in progress."""


class LeaseManager:
    """Renews a lease in a daemon thread, which also reports the host's snapshot before there is a lease.

    Only the ledger declares a lease lost. While it is unreachable, renewal is retried, and the memory stays reserved
    until it is observed as free.
    """

    def __init__(
        self,
        calls: LeaseClient,
        observer: HostObserver,
        processes: Callable[[], Collection[ProcessId]],
        on_lost: Callable[[], None],
    ) -> None:
        """`processes` returns the processes that may hold the memory; `on_lost` is called once, in the thread."""
        self._calls = calls
        self._observer = observer
        self._processes = processes
        self._on_lost = on_lost
        self._lease: lease_pb2.Lease | None = None
        self._renew_seconds = DEFAULT_RENEW_SECONDS
        self._watched: tuple[ProcessId, ...] = ()
        self._once = threading.Lock()
        self._ending = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self.lost = threading.Event()

    def start(self) -> None:
        """Starts renewal."""
        self._thread.start()

    def adopt(self, granted: lease_service_pb2.GrantedLease) -> None:
        """Renews this lease now and periodically. A grant without a renewal is void. Raises WeftError."""
        if granted.HasField("renew_interval"):
            self._renew_seconds = max(MIN_RENEW_SECONDS, seconds_of(granted.renew_interval))
        self._lease = granted.lease
        try:
            self._renew()
        except WeftError:
            # The ledger gives it up, which is not its loss.
            self._lease = None
            raise
        self.hurry()  # the thread sleeps for the interval without a lease

    def hurry(self) -> None:
        """Renews immediately, because the holders of the memory have changed."""
        self._wake.set()

    def confirm(self) -> None:
        """Waits until the ledger knows the processes that hold the memory. Raises WeftError after CONFIRM_SECONDS."""
        deadline = time.monotonic() + CONFIRM_SECONDS
        while not self.lost.is_set():
            try:
                self._renew()
            except WeftError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return

    def stop(self) -> None:
        """Stops the renewal. Idempotent."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def give_up(self) -> None:
        """Releases the lease and reports the final use of its memory.

        Memory of processes that still run stays reserved until they end or free it.
        """
        self.stop()
        lease, self._lease = self._lease, None
        if lease is None or self.lost.is_set():
            return
        # An unreachable ledger releases the lease later, when it is not renewed and the memory is observed as free.
        with suppress(WeftError):
            left = _most_important(self._processes(), self._observer.look_blocking())
            self._note(self._calls.renew([lease_use(lease, left)], self._look(left)))
            self._calls.release(lease)
            # The ledger now watches the remaining processes; on a host without a runner nothing else reports them.
            self._calls.renew([], self._look(left))

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.clear()
            try:
                pause = self._renew()
            except WeftError:
                pause = RETRY_SECONDS
            if not self._ending.is_set():
                self._wake.wait(pause)

    def _renew(self) -> float:
        """Renews and reports. Returns the seconds until the next renewal."""
        with self._once:
            lease = self._lease
            processes = _most_important(self._processes(), self._observer.look_blocking())
            uses = [lease_use(lease, processes)] if lease is not None else []
            # Several responses may be missed within the lease's lifetime.
            timeout = max(MIN_ANSWER_SECONDS, self._renew_seconds)
            response = self._calls.renew(uses, self._look(processes), timeout)
            self._note(response)
        if lease is not None and lease.lease_id in response.lost_lease_ids and not self.lost.is_set():
            self._ending.set()
            self.lost.set()
            self._on_lost()
        wanted = optional_seconds(response, "next_within")
        return self._renew_seconds if wanted is None else min(self._renew_seconds, max(MIN_RENEW_SECONDS, wanted))

    def _look(self, processes: Collection[ProcessId]) -> HostSnapshot:
        return self._observer.look_blocking({*processes, *self._watched}, fresh=True)

    def _note(self, response: lease_service_pb2.RenewLeasesResponse) -> None:
        watched = list(response.watched_processes)[:MAX_PROCESSES]
        for process in watched:
            check_message(process, "watched_processes")
        self._watched = tuple(map(process_id_from, watched))


def _most_important(processes: Collection[ProcessId], sight: HostSnapshot) -> list[ProcessId]:
    """Returns at most MAX_USE_PROCESSES processes, those that hold memory first."""
    holders = {held.process for held in sight.processes if held.bytes_by_device or held.memory_unknown}
    return sorted(processes, key=lambda process: process not in holders)[:MAX_USE_PROCESSES]
