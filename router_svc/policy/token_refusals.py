"""Rate limit of wrong tokens, so that guessing costs the registry little."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalLimits:
    """Bounds on the cost of wrong tokens."""

    burst: int = 20
    """Refusals that a peer may cause in a burst."""
    seconds_each: float = 2.0
    """Time after which the peer may cause another one."""
    burst_overall: int = 500
    """Refusals that all peers together may cause in a burst."""
    seconds_each_overall: float = 0.05
    max_peers: int = 1024
    """Maximum remembered peers; the one refused longest ago is dropped first."""


@dataclass(slots=True)
class _Debt:
    """A leaky bucket: its amount at a time."""

    amount: float = 0.0
    at: float = 0.0

    def left(self, now: float, seconds_each: float) -> float:
        return max(0.0, self.amount - max(0.0, now - self.at) / seconds_each)


class TokenRefusals:
    """Refused tokens by peer."""

    def __init__(self, limits: RefusalLimits | None = None) -> None:
        self._limits = limits or RefusalLimits()
        self._overall = _Debt()
        self._peers: OrderedDict[str, _Debt] = OrderedDict()

    def wait_seconds(self, peer: str, now: float) -> float:
        """Return the seconds until a token of this peer may be checked; 0: now."""
        limits = self._limits
        debt = self._peers.get(peer, _Debt())
        too_much = max(0.0, debt.left(now, limits.seconds_each) + 1 - limits.burst)
        too_much_overall = max(0.0, self._overall.left(now, limits.seconds_each_overall) + 1 - limits.burst_overall)
        return max(too_much * limits.seconds_each, too_much_overall * limits.seconds_each_overall)

    def refused(self, peer: str, now: float) -> None:
        """Record a refused token of this peer."""
        limits = self._limits
        debt = self._peers.pop(peer, _Debt())
        self._peers[peer] = _Debt(debt.left(now, limits.seconds_each) + 1, now)
        self._overall = _Debt(self._overall.left(now, limits.seconds_each_overall) + 1, now)
        while len(self._peers) > limits.max_peers:
            self._peers.popitem(last=False)
