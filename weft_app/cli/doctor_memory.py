"""Leases without an owner in the running mesh, for `weft doctor`."""

from collections.abc import Iterable

from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client._channel import mesh_address
from weft.client._lease_renewal import LeaseClient
from weft.kernel.errors import WeftError
from weft.kernel.units import size_words
from weft_app.compose.home import WeftHome

MAX_NAMED_LEASES = 4


def unowned_leases(home: WeftHome) -> str | None:
    """The leases without an owner, as text; empty: none. None: no mesh runs here, or it is unreachable."""
    if home.running() is None:
        return None
    calls = LeaseClient(mesh_address(home.root, "registry"), lease_pb2.LeaseHolder())
    try:
        return unowned_words(calls.hosts())
    except WeftError:
        return None
    finally:
        calls.close()


def unowned_words(hosts: Iterable[lease_service_pb2.HostMemory]) -> str:
    """The leases without an owner on these hosts, as text; empty: every lease has one."""
    found = [(host.host, lease) for host in hosts for lease in host.leases if lease.unowned]
    words = [
        f"{size_words(sum(share.bytes for share in lease.shares))} on {host} for {lease.purpose} of {lease.holder.name}"
        for host, lease in found[:MAX_NAMED_LEASES]
    ]
    more = f" and {len(found) - MAX_NAMED_LEASES} more" if len(found) > MAX_NAMED_LEASES else ""
    return ", ".join(words) + more
