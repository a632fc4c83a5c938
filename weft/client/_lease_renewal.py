"""Renewal of one program's VRAM lease: calls, renewing thread, what is observed on the host, loss of the lease."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import grpc
from google.protobuf import duration_pb2
from typing_extensions import override

from weft.api.registry.v1 import lease_pb2, lease_service_pb2, lease_service_pb2_grpc
from weft.client._channel import ServiceClient, registry_failure
from weft.gpu.observer import HostObserver
from weft.gpu.process import is_alive, tree_of
from weft.gpu.snapshot import HostSnapshot, ProcessId
from weft.gpu.snapshot_messages import MAX_PROCESSES, process_id_from, process_id_message, snapshot_message
from weft.kernel.errors import WeftError

MAX_SEEN_PROCESSES = 4_096
"""Processes of one tree that are kept in mind; the oldest numbers first."""


class ProcessTree:
    """A process and everything that it has started and that still runs, also what has lost its parents since.

    What was started and lost its parents between two looks is not found. For several threads.
    """

    def __init__(self, root: ProcessId | None = None) -> None:
        self._lock = threading.Lock()
        self._root = root
        self._seen: set[ProcessId] = set()

    def begin(self, root: ProcessId) -> None:
        """Look at this process from now on."""
        with self._lock:
            self._root = root
            self._seen.add(root)

    def living(self) -> tuple[ProcessId, ...]:
        """Those that run now, the root first."""
        with self._lock:
            found = set(tree_of(self._root)) if self._root is not None else set()
            for process in sorted(self._seen - found):
                if is_alive(process):
                    found.update(tree_of(process))
            self._seen = set(sorted(found)[:MAX_SEEN_PROCESSES])
            return tuple(sorted(self._seen, key=lambda process: (process != self._root, process)))


CALL_TIMEOUT_SECONDS = 10.0
ANSWER_MARGIN_SECONDS = 30.0
"""On top of the wait itself: how long the ledger may take to say that it is over."""
MAX_USE_PROCESSES = 256
"""Of one lease; as in `registry.v1.LeaseUse`."""

pb = lease_service_pb2


class LeaseClient(ServiceClient):
    """Calls on the ledger on behalf of one holder. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, holder: lease_pb2.LeaseHolder) -> None:
        super().__init__(target, CALL_TIMEOUT_SECONDS)
        self._holder = holder
        self._stub = lease_service_pb2_grpc.LeaseServiceStub(self._channel)

    def acquire(self, request: pb.AcquireLeaseRequest, wait_seconds: float) -> Iterator[pb.AcquireLeaseResponse]:
        """What the ledger says until the memory is there, at most for so long. Leaving the iterator gives up."""
        request.holder.CopyFrom(self._holder)
        request.max_wait.CopyFrom(_duration(wait_seconds))
        return self._stream(self._stub.AcquireLease(request, timeout=wait_seconds + ANSWER_MARGIN_SECONDS))

    def renew(
        self, leases: Iterable[pb.LeaseUse], sight: HostSnapshot, timeout_seconds: float = CALL_TIMEOUT_SECONDS
    ) -> pb.RenewLeasesResponse:
        """Keep leases, and say what is seen; without leases only the latter."""
        request = pb.RenewLeasesRequest(holder=self._holder, leases=leases, sighting=snapshot_message(sight))
        response: pb.RenewLeasesResponse = self._call(self._stub.RenewLeases, request, timeout_seconds)
        return response

    def release(self, lease: lease_pb2.Lease) -> None:
        """Give a lease up. Raises LEASE_LOST when it is somebody else's by now."""
        request = pb.ReleaseLeaseRequest(
            holder=self._holder, lease_id=lease.lease_id, fencing_number=lease.fencing_number
        )
        self._call(self._stub.ReleaseLease, request)

    def hosts(self, host: str = "") -> list[pb.HostMemory]:
        """Hosts with their devices and leases; with `host` only that one, or none when the ledger has not seen it."""
        return list(self._call(self._stub.ListHostMemory, pb.ListHostMemoryRequest(host=host)).hosts)

    @override
    def _failure(self, error: grpc.RpcError) -> WeftError:
        return registry_failure(error, self._target)


def lease_use(lease: lease_pb2.Lease, processes: Iterable[ProcessId]) -> pb.LeaseUse:
    """How a program uses its lease: it may take all of it at any moment."""
    return pb.LeaseUse(
        lease_id=lease.lease_id,
        fencing_number=lease.fencing_number,
        processes=[process_id_message(process) for process in list(processes)[:MAX_USE_PROCESSES]],
        priority=lease.priority,
    )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


DEFAULT_RENEW_SECONDS = 5.0
"""While nothing is known from a grant or an answer."""
MIN_RENEW_SECONDS = 0.1
MIN_ANSWER_SECONDS = 1.0
"""An answer may take as long as the renewal interval, and this long at least."""
RETRY_SECONDS = 1.0
"""After an answer that did not come."""
CONFIRM_SECONDS = 30.0
"""How long a ledger may be away just when it must be told something."""
STOP_SECONDS = 15.0
"""How long the thread may take to see that it is to end: a call and a look at the host may be under way."""


class LeaseManager:
    """Renews in a daemon thread, which also tells the ledger what is seen while there is no lease yet.

    The ledger alone says that a lease is lost. One that cannot be reached leaves it as it is: the memory stays booked
    until it has been seen back, and the renewal goes on being tried.
    """

    def __init__(
        self,
        calls: LeaseClient,
        observer: HostObserver,
        processes: Callable[[], Collection[ProcessId]],
        on_lost: Callable[[], None],
    ) -> None:
        """`processes` gives those that may hold the memory; `on_lost` is called once, in the thread."""
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
        """Begin to report."""
        self._thread.start()

    def adopt(self, granted: lease_service_pb2.GrantedLease) -> None:
        """Keep this lease from now on. The first renewal happens here: without it the grant is void. Raises."""
        if granted.HasField("renew_interval"):
            self._renew_seconds = max(MIN_RENEW_SECONDS, granted.renew_interval.ToNanoseconds() / 1e9)
        self._lease = granted.lease
        self._renew()
        self.hurry()  # the thread sleeps for as long as is right without a lease

    def hurry(self) -> None:
        """Renew at once: who holds the memory has changed."""
        self._wake.set()

    def confirm(self) -> None:
        """Return once the ledger knows who holds the memory. Raises SERVICE_UNAVAILABLE after CONFIRM_SECONDS."""
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
        """Renew no more. Idempotent."""
        self._ending.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def give_up(self) -> None:
        """Tell the ledger that the lease is not needed any more, and what is seen of its memory.

        Processes that still run are named a last time: their memory stays booked until they end or give it back.
        """
        self.stop()
        lease, self._lease = self._lease, None
        if lease is None or self.lost.is_set():
            return
        # A ledger that cannot be told finds out by itself: nobody renews, and the memory is seen back.
        with suppress(WeftError):
            left = _most_important(self._processes(), self._observer.look_blocking())
            self._note(self._calls.renew([lease_use(lease, left)], self._look(left)))
            self._calls.release(lease)
            # It asks about those that it was told of before: on a host without a runner nobody else answers.
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
        """Renew and report; returns how soon to do it again."""
        with self._once:
            lease = self._lease
            processes = _most_important(self._processes(), self._observer.look_blocking())
            uses = [lease_use(lease, processes)] if lease is not None else []
            # Several answers may be missed within the time to live.
            timeout = max(MIN_ANSWER_SECONDS, self._renew_seconds)
            response = self._calls.renew(uses, self._look(processes), timeout)
            self._note(response)
        if lease is not None and lease.lease_id in response.lost_lease_ids and not self.lost.is_set():
            self._ending.set()
            self.lost.set()
            self._on_lost()
        return min(self._renew_seconds, _seconds(response, self._renew_seconds))

    def _look(self, processes: Collection[ProcessId]) -> HostSnapshot:
        return self._observer.look_blocking({*processes, *self._watched}, fresh=True)

    def _note(self, response: lease_service_pb2.RenewLeasesResponse) -> None:
        watched = list(response.watched_processes)[:MAX_PROCESSES]
        self._watched = tuple(process_id_from(process, "watched_processes") for process in watched)


def _seconds(response: lease_service_pb2.RenewLeasesResponse, otherwise: float) -> float:
    """How soon the next sighting is wanted."""
    wanted = response.next_within.ToNanoseconds() / 1e9 if response.HasField("next_within") else otherwise
    return max(MIN_RENEW_SECONDS, wanted)


def _most_important(processes: Collection[ProcessId], sight: HostSnapshot) -> list[ProcessId]:
    """As many as may be named, those that hold memory first."""
    holders = {held.process for held in sight.processes if held.bytes_by_device or held.memory_unknown}
    return sorted(processes, key=lambda process: process not in holders)[:MAX_USE_PROCESSES]
