"""The ledger of one window as `router_svc.store.limit_windows` keeps it in PostgreSQL, in memory."""

import math
from dataclasses import dataclass, field

from router_svc.policy.leased_window import REPORTED_STEPS, Answer, Report, granted, routers_share


@dataclass(slots=True)
class Held:
    amount: int
    until: float
    number: int


@dataclass(slots=True)
class Ledger:
    length: float
    counted: list[tuple[float, int]] = field(default_factory=list)
    leases: dict[str, Held] = field(default_factory=dict)

    def report(self, holder: str, report: Report, now: float, *, routers: int = 1, silent: int = 0) -> Answer:
        """Takes a report; returns its answer."""
        self.leases = {name: held for name, held in self.leases.items() if held.until + self.length > now}
        own = self.leases.pop(holder, None)
        is_new = own is None or own.number < report.number
        spent = [(now - age + self.length, amount) for age, amount in report.spent] if is_new else []
        self._count(spent, now)
        others = sum(held.amount for held in self.leases.values())
        reserved = routers_share(report.most, silent, routers)
        if is_new:
            room = report.most - reserved - self.total(now) - others - report.keep
            more = granted(room=room, need=report.need, least=report.least, want=report.want, routers=routers)
            own = Held(report.keep + more, now + report.hold_seconds, report.number)
        assert own is not None
        rest = list(self.leases.values())
        self.leases[holder] = own
        return Answer(
            number=own.number,
            lease=own.amount,
            lease_seconds=own.until - now,
            counted=tuple((at - now, amount) for at, amount in self.counted),
            others=tuple((held.until - now, held.amount) for held in rest),
            reserved=reserved,
        )

    def total(self, now: float) -> int:
        """Returns what was counted and has not left."""
        return sum(amount for at, amount in self.counted if at > now)

    def held(self) -> int:
        """Returns what routers hold."""
        return sum(each.amount for each in self.leases.values())

    def _count(self, spent: list[tuple[float, int]], now: float) -> None:
        steps: dict[int, tuple[float, int]] = {}
        for at, amount in [*self.counted, *spent]:
            if at > now:
                step = math.floor(at / (self.length / REPORTED_STEPS))
                latest, sum_ = steps.get(step, (at, 0))
                steps[step] = (max(latest, at), sum_ + amount)
        self.counted = sorted((at, amount) for at, amount in steps.values() if amount)
