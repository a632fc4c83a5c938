"""The checks of `weft doctor` of a registry and its standby, where several addresses are configured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from weft.client._channel import open_mesh_channel
from weft.kernel.address import addresses_of
from weft.kernel.errors import WeftError
from weft.kernel.failover_channel import CHECK_TIMEOUT_SECONDS, READINESS, Reach, reach_of
from weft_app.cli.findings import Finding, Verdict, failed
from weft_app.cli.process_calls import health_of

_CHECK = "registries"
_OWNER = "owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryState:
    """What a registry at one address says of itself."""

    address: str
    reach: Reach
    reason: str = ""
    """Why it does not serve, as its health has it; empty where it does not tell this caller."""
    message: str = ""


def registry_findings(addresses: str | None, look: Callable[[str], RegistryState] | None = None) -> Iterator[Finding]:
    """Yields one finding about the registries at these addresses; none where there are fewer than two."""
    several = addresses_of(addresses or "")
    if len(several) > 1:
        yield finding_of([(look or asked)(address) for address in several])


def finding_of(states: Sequence[RegistryState]) -> Finding:
    """Returns what the states of the registries of one mesh mean together."""
    owners = [each.address for each in states if each.reach is Reach.SERVING]
    words = "; ".join(_words(each) for each in states)
    if not owners:
        return failed(_CHECK, f"no registry serves: {words}", "start one, or look at the log of the one that fails")
    if len(owners) > 1:
        return failed(_CHECK, f"{' and '.join(owners)} each own a database", "give both the same registry.database_url")
    unfit = [each for each in states if each.reason == "standby_unfit"]
    if unfit:
        return Finding(check=_CHECK, verdict=Verdict.WARNING, detail=words, remedy="copy the file, and restart it")
    if not any(each.reach is Reach.NOT_SERVING for each in states):
        return Finding(
            check=_CHECK, verdict=Verdict.WARNING, detail=f"no standby: {words}", remedy="start the other one"
        )
    return Finding(check=_CHECK, verdict=Verdict.OK, detail=words)


def asked(address: str) -> RegistryState:
    """Returns the state of the registry at one address."""
    with open_mesh_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reach = reach_of(stub.Check(READINESS, timeout=CHECK_TIMEOUT_SECONDS).status)
        except grpc.RpcError:
            return RegistryState(address=address, reach=Reach.AWAY)
    try:
        components = {each.name: each for each in health_of(address).components}
    except WeftError:
        # A standby does not know the keys of callers.
        return RegistryState(address=address, reach=reach)
    owner = components.get(_OWNER)
    if owner is None:
        return RegistryState(address=address, reach=reach)
    return RegistryState(address=address, reach=reach, reason=owner.reason, message=owner.message)


def _words(state: RegistryState) -> str:
    if state.reach is Reach.SERVING:
        return f"{state.address} owns the database"
    if state.reach is Reach.AWAY:
        return f"{state.address} does not answer"
    if state.reason == "standby":
        return f"{state.address} is its standby"
    return f"{state.address} does not serve{f' ({state.message})' if state.message else ''}"
