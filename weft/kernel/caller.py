"""Who makes the gRPC call that runs now: set by whoever admits calls, read by servicers that look closer."""

from contextvars import ContextVar

from weft.kernel.principal import LOCAL, Principal

_CALLER: ContextVar[Principal] = ContextVar("weft_caller", default=LOCAL)


def caller() -> Principal:
    """Who calls; whoever can reach a server that admits everybody is local."""
    return _CALLER.get()


def set_caller(principal: Principal) -> None:
    """For the rest of this task, which is one call's."""
    _CALLER.set(principal)
