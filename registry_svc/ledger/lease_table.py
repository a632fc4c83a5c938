"""The table of leases and of the last observation of each host, in memory, and the sessions of lease holders.

Durable facts are written to the store before they change here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from registry_svc.ledger.policy.device_memory import HostAccount, host_account
from registry_svc.ledger.policy.leases import (
    Holder,
    HolderKind,
    Lease,
    with_gone,
)
from registry_svc.mesh.core import RegistryCore
from weft.gpu.snapshot import HostSnapshot
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

IsDialOut = Callable[[str], bool]
"""By a runner's name: whether it is a dial-out runner, whose host name is unverified."""

MAX_HOSTS = 10_000
"""Maximum number of remembered hosts. Far more than the mesh has runners on; programs need no session to name one."""

DEVICES_KEPT_SECONDS = 60.0
"""How long the devices of a host are remembered after a report without devices."""


def _ignore_change(_host: str) -> None:
    return


def no_dial_out(_: str) -> bool:
    """Return False: there are no dial-out runners."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHost:
    """The last observation of a host."""

    snapshot: HostSnapshot
    seen: float
    """When it arrived, monotonic seconds."""
    seen_at: datetime
    by_dial_out: bool


class LeaseTable:
    """Leases by id and by host, and hosts as last seen."""

    def __init__(
        self,
        margin: int,
        host_keep_seconds: float,
        is_dial_out: IsDialOut = no_dial_out,
        on_change: Callable[[str], None] = _ignore_change,
    ) -> None:
        """`host_keep_seconds`: how long a host without leases is remembered when no holder observes it.

        `on_change` is called with a host whenever something of it changes.
        """
        self._on_change = on_change
        self._margin = margin
        self._is_dial_out = is_dial_out
        self._host_keep_seconds = host_keep_seconds
        self._leases: dict[str, Lease] = {}
        self._on_host: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, SeenHost] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def lease(self, lease_id: str) -> Lease | None:
        """Return one lease; None: it has ended or never existed."""
        return self._leases.get(lease_id)

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace its state."""
        self._leases[lease.grant.id] = lease
        self._on_host.setdefault(lease.grant.host, {})[lease.grant.id] = None
        self._on_change(lease.grant.host)

    def drop(self, lease: Lease) -> None:
        """Remove a lease that has ended."""
        del self._leases[lease.grant.id]
        there = self._on_host[lease.grant.host]
        del there[lease.grant.id]
        if not there:
            del self._on_host[lease.grant.host]
        self._on_change(lease.grant.host)

    def leases_on(self, host: str) -> tuple[Lease, ...]:
        """In order of their fencing numbers."""
        return tuple(self._leases[lease_id] for lease_id in self._on_host.get(host, ()))

    def host(self, name: str) -> SeenHost | None:
        """Return a host as last observed; None: not observed since the registry started."""
        return self._hosts.get(name)

    def host_names(self) -> list[str]:
        """Every host that was seen, in order."""
        return sorted(self._hosts)

    def see(self, holder: Holder, snapshot: HostSnapshot, now: float, now_utc: datetime) -> None:
        """Record what a holder observed. Raises TOO_MANY_RESOURCES when MAX_HOSTS are known.

        An observation by a dial-out runner is ignored on a host that a local holder observes or holds memory on: it
        could end leases of others.
        """
        known, by_dial_out = self._hosts.get(snapshot.host), self._is_of_dial_out(holder)
        if by_dial_out and self._is_seen_locally(snapshot.host, now):
            return
        if known is None and len(self._hosts) >= MAX_HOSTS:
            self.forget_hosts(now)
        if known is None and len(self._hosts) >= MAX_HOSTS:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES, f"the memory of {MAX_HOSTS} hosts is booked already, which is the most"
            )
        # A holder that sees no devices may run in a container without them, beside holders that do see them.
        if snapshot.devices or known is None or now - known.seen >= DEVICES_KEPT_SECONDS:
            self._hosts[snapshot.host] = SeenHost(snapshot=snapshot, seen=now, seen_at=now_utc, by_dial_out=by_dial_out)
        if any(not process.alive for process in snapshot.processes):
            for lease in self.leases_on(snapshot.host):
                self._leases[lease.grant.id] = with_gone(lease, snapshot.processes)
        self._on_change(snapshot.host)

    def _is_of_dial_out(self, holder: Holder) -> bool:
        return holder.kind is HolderKind.RUNNER and self._is_dial_out(holder.name)

    def _is_seen_locally(self, host: str, now: float) -> bool:
        """Whether a holder that is not a dial-out runner observed a host lately, or holds memory there."""
        known = self._hosts.get(host)
        if known is not None and not known.by_dial_out and now - known.seen < DEVICES_KEPT_SECONDS:
            return True
        return any(not self._is_of_dial_out(lease.grant.holder) for lease in self.leases_on(host))

    def forget_hosts(self, now: float) -> None:
        """Remove hosts without leases that were not observed for too long."""
        seen_before = now - self._host_keep_seconds
        for name in [name for name, host in self._hosts.items() if host.seen < seen_before]:
            if name not in self._on_host:
                del self._hosts[name]
                self._on_change(name)

    def open(self, host: str) -> HostAccount | None:
        """Return the memory account of a host at this moment; None: it was not observed yet."""
        seen = self._hosts.get(host)
        return None if seen is None else host_account(seen.snapshot, self.leases_on(host), self._margin)


SessionOf = Callable[[str], tuple[str, str] | None]
"""By a runner's name: its session id and its present incarnation; None: there is no such runner."""
OwnsModel = Callable[[str, str], bool]
"""By a runner's name and a model's: whether the runner publishes the model, so that its memory has an owner."""


def owns_all(_runner: str, _model: str) -> bool:
    """See OwnsModel: every lease has an owner."""
    return True


def owner_lookup(core: RegistryCore) -> OwnsModel:
    """Looks up whether a runner, active or not, publishes a model."""

    def owns_model(runner: str, model: str) -> bool:
        state = core.mesh.of_runner(runner)
        return state is not None and (not model or model in state.publications)

    return owns_model


def session_lookup(core: RegistryCore) -> SessionOf:
    """Looks a runner's session id and present incarnation up, whether it is active or not."""

    def session_of(runner: str) -> tuple[str, str] | None:
        state = core.mesh.of_runner(runner)
        return None if state is None else (state.session.id, state.session.incarnation)

    return session_of


def dial_out_lookup(core: RegistryCore) -> IsDialOut:
    """Whether a runner that is known, active or not, joined over a link."""

    def is_dial_out(runner: str) -> bool:
        state = core.mesh.of_runner(runner)
        return state is not None and state.profile.dial_out

    return is_dial_out


class HolderSessions:
    """Checks that a lease holder names the session of its runner and is its present incarnation."""

    def __init__(self, session_of: SessionOf) -> None:
        self._session_of = session_of

    def is_present(self, holder: Holder, session_id: str) -> bool:
        """Return whether a holder is in its present incarnation. Raises PERMISSION_DENIED for another session."""
        if holder.kind is HolderKind.PROGRAM:
            return True
        session = self._session_of(holder.name)
        if session is None or session[0] != session_id:
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"this is not the session of the runner {holder.name!r}; open one first",
                metadata={"runner": holder.name},
            )
        return session[1] == holder.incarnation

    def require_present(self, holder: Holder, session_id: str) -> None:
        """Raise PERMISSION_DENIED unless the holder is the runner of the session, in its present incarnation."""
        if not self.is_present(holder, session_id):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"the runner {holder.name!r} has another incarnation since; open its session again",
                metadata={"runner": holder.name},
            )
