"""Issues tickets: turns a placed request into a grant, signed with the key of the runner's session."""

from router_svc.mailbox import Mailbox
from router_svc.policy.decisions import Placed
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch import placement
from weft.dispatch.fleet import FleetView
from weft.dispatch.tickets import sign
from weft.kernel.clock import Clock
from weft.kernel.names import new_id


class TicketIssuer:
    """Issues tickets of one router."""

    def __init__(self, clock: Clock, *, lifetime_seconds: float) -> None:
        self._clock = clock
        self._lifetime_seconds = lifetime_seconds

    def grant(self, placed: Placed, mailbox: Mailbox, view: FleetView) -> placement.Grant:
        """Return the grant of one attempt.

        `view`: the one that the scheduler decided by, which contains the candidate's runner.
        """
        candidate, request = placed.candidate, mailbox.request
        runner = view.runners[candidate.runner]
        claims = ticket_pb2.TicketClaims(
            ticket_id=new_id("tkt"),
            request_id=request.request_id,
            tenant=request.tenant,
            model=candidate.model,
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            attempt=placed.attempt,
            allow_remote=mailbox.allow_remote,
        )
        expires = self._clock.utc_now().timestamp() + self._lifetime_seconds
        claims.expire_time.FromNanoseconds(int(expires * 1e9))
        signed = claims.SerializeToString()
        return placement.Grant(
            claims=signed,
            mac=sign(signed, runner.ticket_key),
            runner=candidate.runner,
            runner_incarnation=candidate.incarnation,
            address=runner.address,
            host=runner.host,
            model=candidate.model,
            attempt=placed.attempt,
            keep_alive_seconds=placed.keep_alive_seconds,
            priority=request.priority,
            seconds_left=None if placed.deadline_at is None else placed.deadline_at - self._clock.monotonic(),
        )
