"""The memory of hosts as callers see it: devices as last observed, and the leases on them."""

from registry_svc.ledger.domain import DeviceMemory, Granted, HostMemory
from registry_svc.ledger.holders import OwnsModel
from registry_svc.ledger.lease_table import LeaseTable
from registry_svc.ledger.policy.leases import HolderKind, Lease, LeaseState
from registry_svc.ledger.wait_queue import WaitQueue


class HostMemoryView:
    """Reads hosts and leases from the lease table and the wait queue."""

    def __init__(self, table: LeaseTable, queue: WaitQueue, owns_model: OwnsModel) -> None:
        self._table = table
        self._queue = queue
        self._owns_model = owns_model

    def host(self, name: str) -> HostMemory | None:
        """Return one host as last observed; None when no devices were seen on it."""
        seen, account = self._table.host(name), self._table.open(name)
        if seen is None or account is None or not seen.snapshot.devices:
            return None
        return HostMemory(
            host=name,
            source=seen.snapshot.source,
            seen_at=seen.seen_at,
            devices=tuple(
                DeviceMemory(snapshot=device, account=account.devices[device.index]) for device in seen.snapshot.devices
            ),
            leases=tuple(
                Granted(lease=each, seen=account.seen[each.grant.id], unowned=self.is_unowned(each))
                for each in self._table.leases_on(name)
            ),
            waiting_count=len(self._queue.on(name)),
        )

    def granted(self, lease: Lease) -> Granted:
        """Return a lease with the memory that its processes were observed to hold."""
        account = self._table.open(lease.grant.host)
        seen = None if account is None else account.seen.get(lease.grant.id)
        return Granted(lease=lease, seen=seen, unowned=self.is_unowned(lease))

    def is_unowned(self, lease: Lease) -> bool:
        """Return whether no runner answers for a lease: its holder is silent, or no longer publishes the model."""
        holder = lease.grant.holder
        if lease.state is LeaseState.HELD and holder.kind is HolderKind.RUNNER:
            return not self._owns_model(holder.name, lease.grant.purpose)
        return lease.state is LeaseState.ORPHANED
