"""The queue of one target: a pool, or a route."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from router_svc.policy.arrival import Needs
from router_svc.policy.fair_queue import Turn
from router_svc.policy.fair_share import FairShare
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pace import Pace
from router_svc.policy.waiting import BANDS, Kind, LiveRequest, RequestClass
from weft.kernel.request import Priority

if TYPE_CHECKING:
    from router_svc.policy.choice import Considered
    from router_svc.policy.outlook import Outlook

MAX_TENANTS_COMPARED = 64
"""Tenants by name whose turns a position takes into account; the others count as much as these on average."""

MAX_TENANTS_WITH_TIES = 4
"""Up to so many tenants wait, equal accounts are told apart by who came first."""
MAX_REMEMBERED_KINDS = 1_024
"""Kinds that a line keeps to use again."""
Rank = tuple[int, float, tuple[float, float, int]]
"""Band, account, place: of two turns the lower one comes first."""


class Candidacy(NamedTuple):
    """A request whose turn it could be. A tuple, because one is made for every line that is looked at."""

    rank: Rank
    band: Priority
    turn: Turn
    of: RequestClass
    is_overdue: bool
    """Whether it goes before higher bands because its own was passed over long enough."""


class Line:
    """Classes of requests, and who of them goes first. Bands before tenants, tenants by account."""

    def __init__(self, name: str, limits: SchedulerLimits, shares: FairShare, may_run: Callable[[str], bool]) -> None:
        self.name = name
        self.waiting = 0
        self.outlooks: dict[Kind, Outlook] = {}
        """What its members can do for requests of a kind; emptied with every change of that."""
        self.considered: dict[Kind, tuple[float, tuple[Considered, ...]]] = {}
        """Who could serve requests of a kind, as of when; emptied like the outlooks."""
        self.pace = Pace(limits.pace_window_seconds)
        self.classes: dict[Kind, RequestClass] = {}
        self._kinds: dict[Needs, Kind] = {}
        self._limits = limits
        self._shares = shares
        self._may_run = may_run
        self._crowd: tuple[dict[str, int], ...] = ({}, {}, {}, {})
        """Who waits how often, by band."""
        self._places: dict[str, int] = {}
        """Who waits how often, over all bands."""
        self._by_band = [0] * len(BANDS)
        self._paces: dict[tuple[Priority, str], Pace] = {}
        """Of who waits in a band."""
        self._weight_waiting = 0.0
        self._passed_over = 0

    def kind_of(self, needs: Needs) -> Kind:
        """The kind of a request that was tried nowhere yet; the same one for equal needs."""
        kind = self._kinds.get(needs)
        if kind is None:
            if len(self._kinds) >= MAX_REMEMBERED_KINDS:
                self._kinds.clear()
            kind = self._kinds[needs] = Kind(needs)
        return kind

    def add(self, request: LiveRequest, now: float) -> None:
        """It waits here from now on."""
        found = self.classes.get(request.kind)
        if found is None:
            found = self.classes[request.kind] = self._new_class(request.kind)
        found.add(request)
        band, tenant = request.arrival.priority, request.arrival.tenant
        crowd = self._crowd[band]
        places = self._places.get(tenant, 0)
        self._places[tenant] = places + 1
        if not places:
            self._weight_waiting += self._shares.weight(tenant)
        if tenant not in crowd:
            pace = self._paces[band, tenant] = Pace(self._limits.pace_window_seconds)
            pace.note_backlog(now, waiting=True)
        crowd[tenant] = crowd.get(tenant, 0) + 1
        self._by_band[band] += 1
        self.waiting += 1
        self.pace.note_backlog(now, waiting=True)

    def remove(self, request: LiveRequest, now: float) -> None:
        """It does not wait here any more."""
        found = request.waits_in
        assert found is not None, "only who waits can be taken out"
        found.remove(request)
        if not found.waiting:
            del self.classes[found.kind]
        band, tenant = request.arrival.priority, request.arrival.tenant
        crowd = self._crowd[band]
        crowd[tenant] -= 1
        if not crowd[tenant]:
            del crowd[tenant], self._paces[band, tenant]
        self._by_band[band] -= 1
        self.waiting -= 1
        self._places[tenant] -= 1
        if not self._places[tenant]:
            del self._places[tenant]
            self._weight_waiting -= self._shares.weight(tenant)
        if not self.waiting:
            self._weight_waiting, self._passed_over = 0.0, 0
            self.pace.note_backlog(now, waiting=False)

    def candidacies(self, blocked: set[RequestClass], now: float) -> Iterator[Candidacy]:
        """Whose turn it could be, class by class."""
        overdue_is_next = self._passed_over >= self._limits.lower_band_every - 1
        for of in self.classes.values():
            if of in blocked or not of.waiting:
                continue
            first = of.turn()
            if first is None:
                continue
            band, turn = first
            yield Candidacy((band, turn.account, turn.place), band, turn, of, is_overdue=False)
            if overdue_is_next:
                yield from self._overdue(of, now)

    def note_grant(self, chosen: Candidacy, waited_seconds: float, now: float) -> None:
        """It was granted a slot; it is still among those who wait."""
        self.pace.note_grant(waited_seconds, now)
        band = chosen.band
        self._paces[band, chosen.turn.tenant].note_grant(waited_seconds, now)
        if chosen.is_overdue:
            self._passed_over = 0
        elif any(self._by_band[band + 1 :]):
            self._passed_over += 1

    def places_of(self, tenant: str) -> int:
        """How many requests of this tenant wait here."""
        return self._places.get(tenant, 0)

    def tenants_in(self, band: Priority) -> dict[str, int]:
        """Who waits how often in a band; only to be read."""
        return self._crowd[band]

    def lowest_band(self) -> Priority | None:
        """The lowest band in which somebody waits; None: nobody waits."""
        return next((band for band in reversed(BANDS) if self._by_band[band]), None)

    def pace_of(self, tenant: str, band: Priority) -> Pace | None:
        """How fast the tenant's requests in a band are served; None: none waits there."""
        return self._paces.get((band, tenant))

    def share_of(self, tenant: str) -> float:
        """The tenant's share among all who wait here and itself, 0 to 1. It must be active."""
        weight = self._shares.weight(tenant)
        others = self._weight_waiting - (weight if self.places_of(tenant) else 0.0)
        return weight / (max(0.0, others) + weight)

    def queued_tokens(self) -> float:
        """Estimated tokens of all who wait."""
        return sum(of.queued_tokens for of in self.classes.values())

    def last_of_largest(self, band: Priority, spared: str | None) -> int | None:
        """The last request of the tenant that has most places by its weight in a band, `spared` not counted.

        Among equals it is the one that was served most. None: there is no such tenant.
        """
        shares = self._shares
        others = [(tenant, count) for tenant, count in self._crowd[band].items() if tenant != spared]
        if not others:
            return None
        largest, _ = max(others, key=lambda each: (each[1] / shares.weight(each[0]), shares.account(each[0]), each[0]))
        queues = (of.bands[band] for of in self.classes.values())
        lasts = (queue.last_of(largest) for queue in queues if queue is not None)
        return max(place for place in lasts if place is not None)[2]

    def position_of(self, request: LiveRequest) -> int:
        """The place at which it would be served now, from 1 on: exact within a tenant, estimated between tenants."""
        arrival, accounts = request.arrival, self._shares.active
        band, tenant = arrival.priority, arrival.tenant
        own = self._own_ahead(request)
        until = accounts[tenant].served + own * accounts[tenant].mean_cost
        crowd = self._crowd[band]
        ahead = float(sum(self._by_band[:band]) + own)
        compared = passed = 0
        looks_at_ties = len(crowd) <= MAX_TENANTS_WITH_TIES
        for other, count in crowd.items():
            if other == tenant:
                continue
            if compared == MAX_TENANTS_COMPARED:
                ahead += passed / compared * (len(crowd) - 1 - compared)
                break
            compared += 1
            account = accounts[other]
            behind = until - account.served
            if behind < 0:
                continue
            turns = int(behind / account.mean_cost)
            if turns >= count:
                turns = count
            elif turns * account.mean_cost < behind or (looks_at_ties and self._goes_first(other, turns, request)):
                turns += 1
            ahead += turns
            passed += turns
        return 1 + int(ahead)

    def _own_ahead(self, request: LiveRequest) -> int:
        band, tenant, place = request.arrival.priority, request.arrival.tenant, request.place
        ahead = 0
        for of in self.classes.values():
            queue = of.bands[band]
            if queue is not None:
                ahead += queue.ahead_of(tenant, place)
        return ahead

    def _goes_first(self, other: str, turns: int, request: LiveRequest) -> bool:
        """Whether, with equal accounts after so many turns, this tenant's next request comes before this one."""
        band, place = request.arrival.priority, request.place
        for of in self.classes.values():
            queue = of.bands[band]
            if queue is not None:
                next_place = queue.place_of(other, turns)
                if next_place is not None and next_place < place:
                    return True
        return False

    def _overdue(self, of: RequestClass, now: float) -> Iterator[Candidacy]:
        patience = self._limits.lower_band_patience_seconds
        highest = next(band for band in BANDS if self._by_band[band])
        for band in BANDS[highest + 1 :]:
            turn = of.turn_in(band)
            if turn is not None and now - turn.place[1] >= patience:
                yield Candidacy((-1, turn.place[1], turn.place), band, turn, of, is_overdue=True)

    def _new_class(self, kind: Kind) -> RequestClass:
        return RequestClass(self.name, kind, self._shares.account, self._may_run)
