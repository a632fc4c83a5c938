"""Checks samples of a two-device ledger against its rules while engines take turns.

A sample contains only engines that were running before and after the ledger was read, so that conclusions hold however
long reading took.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    index: int
    leasable_bytes: int
    """Its memory without the margin."""
    booked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLease:
    lease_id: str
    fencing_number: int
    model: str
    shares: Mapping[int, int]
    """Bytes by device, in the order of the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The ledger at one moment, and the engines that were running during the whole reading."""

    devices: tuple[SeenDevice, ...]
    leases: tuple[SeenLease, ...]
    engines: Mapping[Hashable, str] = field(default_factory=dict)
    """Model by engine process."""


@dataclass(slots=True)
class LedgerChecker:
    """Checks a run's samples in order, and collects violations of the rules."""

    broken: list[str] = field(default_factory=list)
    """Violations without duplicates."""
    samples: int = 0
    leases: dict[str, SeenLease] = field(default_factory=dict)
    """All leases so far by id."""
    _present: set[str] = field(default_factory=set)
    _newest_number: int = 0
    _lease_of_engine: dict[Hashable, str] = field(default_factory=dict)

    def note(self, sample: Sample) -> None:
        """Checks a sample, also against earlier ones."""
        self.samples += 1
        self._check_devices(sample)
        self._check_order(sample)
        self._check_engines(sample)
        self._present = {lease.lease_id for lease in sample.leases}

    def granted(self, model: str) -> list[SeenLease]:
        """Returns all leases of a model, in order."""
        found = [lease for lease in self.leases.values() if lease.model == model]
        return sorted(found, key=lambda lease: lease.fencing_number)

    def _check_devices(self, sample: Sample) -> None:
        for device in sample.devices:
            reserved = sum(lease.shares.get(device.index, 0) for lease in sample.leases)
            if reserved > device.leasable_bytes or device.booked_bytes > device.leasable_bytes:
                self._note(f"device {device.index} is booked beyond its size")
            if reserved != device.booked_bytes:
                self._note(f"device {device.index} is not booked with what its leases reserve")

    def _check_order(self, sample: Sample) -> None:
        known = {device.index for device in sample.devices}
        newest = self._newest_number
        for lease in sorted(sample.leases, key=lambda lease: lease.fencing_number):
            if list(lease.shares) != sorted(lease.shares) or not lease.shares.keys() <= known:
                self._note(f"a lease of {lease.model} takes its devices out of order")
            before = self.leases.get(lease.lease_id)
            if before is None:
                self.leases[lease.lease_id] = lease
                if lease.fencing_number <= newest:
                    self._note(f"a lease of {lease.model} has a number that is not new")
            elif lease.lease_id not in self._present:
                self._note(f"a lease of {lease.model} that had ended is back")
            elif before != lease:
                self._note(f"a lease of {lease.model} has changed")
            self._newest_number = max(self._newest_number, lease.fencing_number)

    def _check_engines(self, sample: Sample) -> None:
        listed = {lease.lease_id for lease in sample.leases}
        for process, model in sample.engines.items():
            if process not in self._lease_of_engine:
                own = [lease for lease in sample.leases if lease.model == model]
                if not own:
                    self._note(f"an engine of {model} runs without a lease")
                    continue
                newest = max(own, key=lambda lease: lease.fencing_number)
                self._lease_of_engine[process] = newest.lease_id
            elif self._lease_of_engine[process] not in listed:
                self._note(f"the lease of {model} ended before its engine had")

    def _note(self, sentence: str) -> None:
        if sentence not in self.broken:
            self.broken.append(sentence)
