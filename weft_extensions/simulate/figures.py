"""Figures of a run, computed from its metrics and printed by `weft mesh simulate`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.kernel.requests.request_values import Priority
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.hosts import Host
from weft_extensions.simulate.metrics import GroupMetrics, RequestGroup, Waits
from weft_extensions.simulate.starvation import cold_wait_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFigures:
    """Figures of one group of requests."""

    name: str
    requests: int
    served: int
    refused: Mapping[str, int]
    """Requests that were not served by reason, most frequent first."""
    waits: Waits | None
    """Waits of served requests from arrival to start; None: none was served."""
    refusal_waits: Waits | None
    """Waits of unserved requests from arrival to refusal."""
    first_tokens: Waits | None
    """Times of served requests from arrival to the first token."""
    cached_share: float | None
    """Share of the prompt tokens of served requests that were cached; None: they had none."""
    good_tokens_per_second: float
    """Output tokens of requests served in time, divided by the time in which requests arrived."""
    served_share: float | None = None
    """For a tenant: its served cost divided by its fair share; None: it sent nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """How hosts spent their time, as shares from 0 to 1."""

    hosts: int
    busy: float
    loading: float
    """Time spent only loading or evicting models."""
    idle: float
    down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a complete or interrupted run."""

    simulated_seconds: float
    is_complete: bool
    total: GroupFigures
    tenants: tuple[GroupFigures, ...]
    targets: tuple[GroupFigures, ...]
    bands: tuple[GroupFigures, ...]
    loads: int
    swaps: int
    cold_waits: Waits | None
    """Waits for a target with nothing loaded, until a load began."""
    cold_wait_bound_seconds: float
    """Upper bound of cold waits: `max_cold_wait_seconds` plus a turn of each rival on the host."""
    estimate_errors: Waits | None
    """Errors of the first estimates of requests that waited, in seconds."""
    estimate_error_shares: Waits | None
    """The same as shares of the wait after the estimate, which counts as at least a second."""
    quotes_kept: Mapping[str, float]
    """Shares of the answers that kept the time quoted for nine of ten; empty: none was quoted."""
    attempts: int
    attempts_per_request: float
    """Attempts per request with at least one."""
    attempts_per_request_in_outage: float | None
    """The same on failing hosts; None: there were no attempts."""
    fairness: float
    """Jain's index of the tenants' served shares; 1 is perfectly fair."""
    hosts: HostFigures

    @property
    def swaps_per_1000(self) -> float:
        """Swaps per thousand served requests."""
        return 1000 * self.swaps / self.total.served if self.total.served else 0.0


def figures_of(simulation: Simulation) -> Figures:
    """Returns the figures of a run, which may be interrupted."""
    metrics, scenario = simulation.metrics, simulation.scenario
    seconds = min(simulation.events.now, scenario.duration_seconds) or 1.0
    weights = {who.tenant: scenario.settings.tenant(who.tenant).weight for who in metrics.by_group}
    tenants = _by(metrics.by_group, lambda who: who.tenant)
    # Durable requests get the remaining capacity; fairness concerns the other classes.
    callers = {who: tally for who, tally in metrics.by_group.items() if who.band is not Priority.DURABLE}
    shares = served_shares(_by(callers, lambda who: who.tenant), weights)
    first = metrics.first_attempts
    return Figures(
        simulated_seconds=simulation.events.now,
        is_complete=simulation.is_over,
        total=_group("all", metrics.total(), seconds),
        tenants=tuple(_group(name, tally, seconds, shares.get(name)) for name, tally in tenants.items()),
        targets=tuple(
            _group(name, tally, seconds) for name, tally in _by(metrics.by_group, lambda w: w.target).items()
        ),
        bands=tuple(
            _group(name, tally, seconds)
            for name, tally in _by(metrics.by_group, lambda who: who.band.name.lower()).items()
        ),
        loads=simulation.loader.loads,
        swaps=simulation.loader.swaps,
        cold_waits=Waits.of(metrics.cold_waits),
        cold_wait_bound_seconds=cold_wait_bound(scenario, simulation.world),
        estimate_errors=Waits.of(metrics.estimate_errors),
        estimate_error_shares=Waits.of(metrics.estimate_error_shares),
        quotes_kept=quotes_kept(simulation),
        attempts=metrics.attempts,
        attempts_per_request=metrics.attempts / first if first else 0.0,
        attempts_per_request_in_outage=(
            metrics.attempts_in_outage / metrics.first_attempts_in_outage if metrics.first_attempts_in_outage else None
        ),
        fairness=jain_index(list(shares.values())),
        hosts=_hosts(simulation.world.hosts.values(), simulation.events.now),
    )


def quotes_kept(simulation: Simulation) -> dict[str, float]:
    """Returns the shares of the answers that kept the first token and the end quoted for nine of ten."""
    known = {} if simulation.quotes is None else simulation.quotes.coverage()
    return {name: round(each.kept / each.answers, 4) for name, each in known.items() if each.answers}


def served_shares(tenants: Mapping[str, GroupMetrics], weights: Mapping[str, float]) -> dict[str, float]:
    """Returns the served cost of each tenant divided by its max-min fair share of all served cost."""
    offered = {name: tally.offered_cost for name, tally in tenants.items() if tally.offered_cost}
    capacity = sum(tally.served_cost for tally in tenants.values())
    fair = max_min_shares(offered, weights, capacity)
    return {name: tenants[name].served_cost / fair[name] for name in offered if fair[name]}


def _by(
    by_group: Mapping[RequestGroup, GroupMetrics], name_of: Callable[[RequestGroup], str]
) -> dict[str, GroupMetrics]:
    groups: dict[str, GroupMetrics] = {}
    for who in sorted(by_group, key=lambda each: (each.tenant, each.target, each.band)):
        groups.setdefault(name_of(who), GroupMetrics()).add(by_group[who])
    return groups


def _group(name: str, tally: GroupMetrics, seconds: float, served_share: float | None = None) -> GroupFigures:
    return GroupFigures(
        name=name,
        requests=tally.requests,
        served=tally.served,
        refused={reason.name.lower(): count for reason, count in tally.refusals.most_common()},
        waits=Waits.of(tally.waits),
        refusal_waits=Waits.of(tally.refusal_waits),
        first_tokens=Waits.of(tally.first_tokens),
        cached_share=tally.cached_tokens / tally.prompt_tokens if tally.prompt_tokens else None,
        good_tokens_per_second=tally.good_tokens / seconds,
        served_share=served_share,
    )


def _hosts(hosts: Iterable[Host], now: float) -> HostFigures:
    local = [host for host in hosts if not host.remote]
    for host in local:
        host.note(now)
    whole = (now * len(local)) or 1.0
    busy = sum(host.busy_seconds for host in local) / whole
    loading = sum(host.load_seconds for host in local) / whole
    down = sum(host.down_seconds for host in local) / whole
    return HostFigures(
        hosts=len(local), busy=busy, loading=loading, down=down, idle=max(0.0, 1 - busy - loading - down)
    )


def jain_index(shares: Sequence[float]) -> float:
    """Returns Jain's index: 1 if all are equal or empty, 1 / n if one has everything (Jain, Chiu, Hawe 1984)."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def max_min_shares(offered: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Returns max-min fair shares (water filling): at most what is offered, shortage divided by weight."""
    shares: dict[str, float] = {}
    open_names = sorted(offered, key=lambda name: offered[name] / weights[name])
    left, weight_left = capacity, sum(weights[name] for name in open_names)
    for name in open_names:
        shares[name] = min(offered[name], left * weights[name] / weight_left) if weight_left > 0 else 0.0
        left -= shares[name]
        weight_left -= weights[name]
    return shares
