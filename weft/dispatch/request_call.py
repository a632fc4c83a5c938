"""What every request under way has, whatever it asks for: its journey, its place in the mesh, its receipt."""

import asyncio
from dataclasses import dataclass, replace

import grpc

from weft.api.common.v1 import agent_behaviour_pb2, event_pb2, receipt_pb2
from weft.api.runner.v1 import serve_options_pb2, ticket_pb2
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.handling import serve_options
from weft.dispatch.payload_description import Payload, affinity_key, describe
from weft.dispatch.placement import Grant, LoadingModel, PlacementPort, PlacementRequest, WaitingInQueue
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.request_trace import RequestContext, RequestTrace, log_receipt
from weft.kernel.address import metadata_of
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call
from weft.kernel.telemetry import TRACEPARENT


@dataclass(frozen=True, slots=True)
class CallDeps:
    """What every call of one dispatcher works with."""

    placement: PlacementPort
    channels: ChannelPool
    clock: Clock
    steady: ReconnectConfig
    fleet: FleetSource | None

    def view(self) -> FleetView:
        """What is known of the mesh; of no mesh, that there is nothing in it."""
        return FleetView(revision=1) if self.fleet is None else self.fleet.view

    def may_leave(self, grant: Grant) -> bool:
        """Whether using a grant may send bytes off the premises.

        The router may know models that are not known here yet: of those, the ticket says whether it lets bytes out.
        """
        known = self.view().models.get(grant.model)
        if known is None or known.expected:
            return ticket_pb2.TicketClaims.FromString(grant.claims).allow_remote
        return known.remote


class RequestCall:
    """What every kind of request shares: the journey, the placement, the receipt."""

    def __init__(self, tools: CallDeps, context: RequestContext) -> None:
        self._tools = tools
        self._context = context
        self._journey = RequestTrace(context, tools.clock.monotonic())
        self._receipt: receipt_pb2.Receipt | None = None

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt, once the request has ended; None before."""
        return self._receipt

    def read_whole(self, *, whole: bool) -> None:
        """Sets whether the answer is read only when complete, from the next attempt on."""
        self._context = self._journey.context = replace(self._context, whole=whole)

    def _place(
        self, payload: Payload, behaviour: agent_behaviour_pb2.AgentBehaviour | None = None
    ) -> ReconnectingPlacement:
        context = self._context
        salt = f"{context.tenant}\0{context.handling.cache_tag}"
        description = describe(payload, salt=salt, behaviour=behaviour)
        request = PlacementRequest(
            request_id=context.request_id,
            tenant=context.tenant,
            model=context.model,
            operation=context.operation,
            priority=context.priority,
            names_priority=context.names_priority,
            allow_remote=context.allow_remote,
            seconds_left=self._seconds_to_deadline(),
            traceparent=context.traceparent,
            prompt_tokens=description.prompt_tokens,
            max_output_tokens=description.max_output_tokens,
            skills=description.skills,
            tools=description.tools,
            affinity_key=affinity_key(context.session, context.tenant),
            prefix_digests=description.prefix_digests,
            client_id=context.client_id,
        )
        return ReconnectingPlacement(self._tools.placement, request, self._tools.clock, self._tools.steady)

    def _seconds_left(self, grant: Grant) -> float | None:
        """For an attempt that begins now: what the caller or the request's route leaves it, whichever is less."""
        left = [] if grant.seconds_left is None else [grant.seconds_left]
        own = self._seconds_to_deadline()
        if own is not None:
            left.append(own)
        return max(0.0, min(left)) if left else None

    def _seconds_to_deadline(self) -> float | None:
        """What is left of the caller's time; None: it set no deadline."""
        if self._context.timeout_seconds is None:
            return None
        return max(0.0, self._context.timeout_seconds - (self._tools.clock.monotonic() - self._journey.arrived))

    def _options(self, grant: Grant) -> serve_options_pb2.ServeOptions:
        handling = self._context.handling
        if handling.keep_alive_seconds is None:
            handling = replace(handling, keep_alive_seconds=grant.keep_alive_seconds)
        priority = self._context.priority if grant.priority is None else grant.priority
        return serve_options(handling, priority, whole=self._context.whole)

    def _metadata(self, grant: Grant) -> tuple[tuple[str, str], ...]:
        about = (("x-request-id", self._context.request_id), (TRACEPARENT, self._context.traceparent))
        return about + metadata_of(grant.address)

    async def _fail_attempt(self, placement: ReconnectingPlacement, grant: Grant, error: WeftError) -> None:
        self._journey.note_attempt_failed(error.reason)
        await placement.report_attempt_failed(grant.attempt, error.reason)

    async def _fail_attempt_or_raise(self, placement: ReconnectingPlacement, grant: Grant, error: WeftError) -> None:
        """An attempt failed: another may follow, unless its content has begun to go out."""
        if self._journey.first_content is None:
            await self._fail_attempt(placement, grant, error)
            return
        self._journey.note_attempt_failed(error.reason)
        error.metadata["content_started"] = "true"
        raise error

    def _close(self, reason: Reason, runner_part: receipt_pb2.Receipt | None) -> receipt_pb2.Receipt:
        now = self._tools.clock.monotonic()
        self._receipt = self._journey.receipt(reason, runner_part, now)
        log_receipt(self._context, self._receipt, now - self._journey.arrived)
        return self._receipt

    def _close_failed(self, error: Exception) -> receipt_pb2.Receipt:
        """The receipt of a request that an error ended; one that was over already keeps its own."""
        if self._receipt is None:
            return self._close(_reason_of(error), None)
        return self._receipt

    async def _report_failed(self, placement: ReconnectingPlacement, error: Exception) -> None:
        """Reports the failure to the router, which keeps it for `weft explain`."""
        await placement.report_finished(_reason_of(error), self._close_failed(error))

    def _close_left(self) -> None:
        """The receipt of a request whose caller left, or whose deadline passed, if nothing else has ended it."""
        if self._receipt is None:
            is_late = self._seconds_to_deadline() == 0
            self._close(Reason.DEADLINE_EXCEEDED if is_late else Reason.CANCELLED, None)


def waiting_event(decision: WaitingInQueue | LoadingModel) -> event_pb2.InferenceEvent:
    """The client's event for a decision of the scheduler."""
    event = event_pb2.InferenceEvent()
    if isinstance(decision, WaitingInQueue):
        event.queued.position = decision.position
        event.queued.reason = decision.reason
        if decision.eta_seconds is not None:
            event.queued.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
        return event
    event.loading.stage = decision.stage
    if decision.progress is not None:
        event.loading.progress = decision.progress
    if decision.eta_seconds is not None:
        event.loading.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
    return event


def runner_error(error: grpc.aio.AioRpcError) -> WeftError:
    """The error of a failed call to a runner; a cancelled call is the runner's doing, ours never gets here."""
    found = error_from_call(error, Reason.WORKER_LOST)
    if found.reason is Reason.CANCELLED:
        return WeftError(Reason.WORKER_LOST, "the runner dropped the request")
    if found.reason is Reason.DEADLINE_EXCEEDED:
        found.message = "the answer was not complete before the deadline of the request or of its route"
    return found


def require_cancelled() -> None:
    """Raises WORKER_LOST for a cancelled call to a runner unless this task was really cancelled.

    gRPC also reports a call as cancelled whose channel was closed under it.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise WeftError(Reason.WORKER_LOST, "the connection to the runner was closed")


def reported_error(rejection: WeftError, attempt: WeftError | None) -> WeftError:
    """The error for the caller: a scheduler that gives up after a failed attempt repeats only the attempt's reason."""
    return attempt if attempt is not None and attempt.reason is rejection.reason else rejection


def _reason_of(error: Exception) -> Reason:
    return error.reason if isinstance(error, WeftError) else Reason.INTERNAL


def ticket_of(grant: Grant) -> ticket_pb2.Ticket:
    """The permit of a grant, as runners take it."""
    return ticket_pb2.Ticket(claims=grant.claims, mac=grant.mac)
