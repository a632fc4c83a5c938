"""Requests that a proxy carries to a runner or to its engine itself: their endpoints, their terms, their reports."""

from enum import StrEnum
from typing import Protocol

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.fleet import RunnerView
from weft.dispatch.placement import PlacementRequest
from weft.kernel.timestamps import set_seconds
from weft.kernel.value import value_class


class EndpointKind(StrEnum):
    """What a proxy calls for a model."""

    SIDECAR = "sidecar"
    """The runner's HTTP API, with a ticket."""
    ENGINE = "engine"
    """The engine's own port, with the key of its present start; `EngineLaneService.HoldSlot` has both."""


@value_class(kw_only=True)
class LaneEndpoint:
    """Where a proxy sends the requests for one model of one runner."""

    kind: EndpointKind
    url: str
    """Base URL without path, such as `http://10.0.0.7:8081`; empty for an engine, whose address `HoldSlot` has."""


def endpoint_in(runner: RunnerView, model: str) -> LaneEndpoint | None:
    """Returns where a proxy sends requests for a model; None: nowhere, they go through a gateway."""
    instance = runner.instances.get(model)
    if instance is not None and instance.engine_lane:
        return LaneEndpoint(kind=EndpointKind.ENGINE, url="")
    return LaneEndpoint(kind=EndpointKind.SIDECAR, url=runner.lane_url) if runner.lane_url else None


def kind_of(capability: runner_pb2.Capability, instance: runner_pb2.InstanceState) -> EndpointKind | None:
    """Returns what a proxy calls for a model as its runner reports it; None: nothing."""
    if instance.engine_lane:
        return EndpointKind.ENGINE
    return EndpointKind.SIDECAR if capability.lane_url else None


@value_class(kw_only=True)
class LaneWaits:
    """How long a request has waited when it is granted."""

    all_seconds: float
    """From its arrival at the mesh."""
    load_seconds: float
    """The part of it for models to load."""


def set_lane_terms(
    terms: ticket_pb2.LaneTerms,
    request: PlacementRequest,
    waits: LaneWaits,
    keep_alive_seconds: float | None,
    seconds_left: float | None,
) -> None:
    """Write into a ticket what the runner must know of a request that has no dispatcher."""
    terms.report_to = request.report_to
    terms.priority = request.priority.wire  # type: ignore[assignment]  # same numbers
    terms.asked_model = request.asked_model
    terms.caller = request.caller
    set_seconds(terms.load_wait, waits.load_seconds)
    set_seconds(terms.queue_wait, waits.all_seconds - waits.load_seconds)
    if keep_alive_seconds is not None:
        terms.keep_alive.FromNanoseconds(int(keep_alive_seconds * 1e9))
    if seconds_left is not None:
        set_seconds(terms.time_left, seconds_left)


class LostRequests(Protocol):
    """Port to a router: requests of its earlier processes, which a proxy has carried on, and how they ended."""

    def is_lost(self, request_id: str, tenant: str) -> bool:
        """Whether nothing is known of the end of a request: there is no record, or one that says so.

        An empty tenant is any; then there must be a record.
        """
        ...

    def note_gone(self, claims: ticket_pb2.TicketClaims) -> None:
        """Notes that a runner works no longer on an attempt that this process has not granted."""
        ...

    def recover(self, claims: ticket_pb2.TicketClaims, receipt: receipt_pb2.Receipt) -> None:
        """Records how a lost request ended, and counts it. Does nothing where `is_lost` is no longer so.

        `claims`: those of its ticket; where only its id is known, that alone.
        """
        ...


class AttemptReports(Protocol):
    """Port of a router: hears how the attempts ended that runners served for proxies."""

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: lane_service_pb2.AttemptReport) -> bool:
        """Notes the end of an attempt; called from the event loop, and must not block.

        `claims` are those of the report's ticket, whose signature is checked: this router, or another one, has issued
        it for the runner that it names. Returns whether the report counts; False for an attempt that is not known, or
        whose end is known already. Reports may come twice, and before or after other signs of the end.
        """
        ...
