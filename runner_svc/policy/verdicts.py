"""What the events of a life mean to those who wait for it."""

from runner_svc.policy.life_events import Died, Event, Faulted, LoadFailed
from runner_svc.policy.lifecycle import is_given_up
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def is_unmet(event: Event) -> bool:
    """Whether a load ended that is no death of its model: for want of memory, or by options of its own."""
    return isinstance(event, LoadFailed) and is_given_up(event)


def verdict_on(event: Died | Faulted, *, attached: bool) -> WeftError:
    """What the requests under way are told."""
    if isinstance(event, Faulted):
        done = "let go of" if attached else "restarted"
        return WeftError(Reason.WORKER_RESTARTED, f"the backend was {done} while it worked on the request: {event.how}")
    reason = Reason.OUT_OF_MEMORY if event.reason is Reason.OUT_OF_MEMORY else Reason.SERVER_DIED
    return WeftError(reason, f"the backend died while it worked on the request ({event.how})")
