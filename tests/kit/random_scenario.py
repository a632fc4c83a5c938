"""Generates small random scenarios from seeds, and runs them with all invariant checks."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, RemotePermission, Settings, TenantSettings
from router_svc.policy.port import SchedulerPort
from router_svc.policy.scheduler import Scheduler
from weft.kernel.requests.request_values import CALLER_CLASSES, Priority, Skill
from weft_extensions.simulate.engine import Simulation
from weft_extensions.simulate.invariants import InvariantChecker, InvariantError
from weft_extensions.simulate.scenario import (
    Amount,
    Delays,
    Failure,
    FailureMode,
    HostGroup,
    ModelKind,
    Pattern,
    Rate,
    Scenario,
    Tenant,
    Traffic,
    seeded_random,
)

FEWEST_REQUESTS, MOST_REQUESTS = 30, 150
FEWEST_DURABLE, MOST_DURABLE = 10, 80
WITHDRAWN_AFTER_SECONDS = 300.0
CLOUD = "cloud"


def random_scenario(seed: int) -> Scenario:
    """Returns a mesh of one to three hosts with one to five models, and 30 to 150 requests of one to four tenants.

    Half of the scenarios also have durable requests.
    """
    scenario = _with_unowned_memory(seeded_random(seed, "waits"), _of_callers(seed))
    random = seeded_random(seed, "durable")
    return _with_durable(random, scenario) if random.random() < 0.5 else scenario


def _of_callers(seed: int) -> Scenario:
    random = seeded_random(seed, "scenario")
    hosts = _hosts(random)
    models = _models(random, hosts)
    tenants = tuple(Tenant(name=f"t{number}", priorities=_bands(random)) for number in range(random.randint(1, 4)))
    routes = _routes(random, models)
    duration = random.choice((8.0, 20.0, 40.0))
    requests = random.randint(FEWEST_REQUESTS, MOST_REQUESTS)
    targets = [model.name for model in models] + [f"route/{name}" for name in routes]
    streams = random.randint(1, 5)
    traffic = tuple(
        _traffic(random, random.choice(tenants).name, random.choice(targets), requests / duration / streams)
        for _ in range(streams)
    )
    return Scenario(
        name=f"random-{seed}",
        hosts=hosts,
        models=models,
        tenants=tenants,
        traffic=traffic,
        routes=routes,
        cloud_fallback=random.random() < 0.6,
        failures=_failures(random, hosts, duration),
        settings=_settings(random, models, tenants),
        limits=_limits(random),
        delays=Delays(report_seconds=random.choice((0.0, 0.05, 0.5)), memory_watch_seconds=random.choice((0.1, 0.5))),
        duration_seconds=duration,
        max_requests=requests,
        seed=seed,
    )


def _with_unowned_memory(random: Random, scenario: Scenario) -> Scenario:
    """Adds unowned memory to some hosts, and a short maximum load pause to some scenarios.

    Uses a separate random source, as do durable requests, so that the rest of a seed's scenario is unchanged.
    """
    hosts = (
        replace(host, unowned_gib=random.choice((0, 0, 0, 3))) if host.memory_gib else host for host in scenario.hosts
    )
    longest_pause = random.choice((900.0, 900.0, 10.0))
    return replace(scenario, hosts=tuple(hosts), limits=replace(scenario.limits, max_load_pause_seconds=longest_pause))


def _with_durable(random: Random, scenario: Scenario) -> Scenario:
    """Adds one or two streams of durable requests from a separate random source.

    The requests are withdrawn after a while, so that a run ends even if no model is loaded for them.
    """
    tenants = tuple(
        Tenant(name=f"d{number}", priorities={Priority.DURABLE: 1.0}) for number in range(random.randint(1, 2))
    )
    targets = [model.name for model in scenario.models] + [f"route/{name}" for name in scenario.routes]
    requests = random.randint(FEWEST_DURABLE, MOST_DURABLE)
    rate = requests / scenario.duration_seconds / len(tenants)
    streams = (_traffic(random, tenant.name, random.choice(targets), rate) for tenant in tenants)
    durable = (replace(stream, deadline_seconds=None, patience_seconds=WITHDRAWN_AFTER_SECONDS) for stream in streams)
    settings = {
        tenant.name: TenantSettings(weight=random.choice((1.0, 3.0)), max_in_flight=random.choice((0, 0, 2)))
        for tenant in tenants
    }
    return replace(
        scenario,
        tenants=(*scenario.tenants, *tenants),
        traffic=(*scenario.traffic, *durable),
        settings=replace(scenario.settings, tenants={**scenario.settings.tenants, **settings}),
        limits=replace(
            scenario.limits,
            durable_share=random.choice((0.0, 0.1, 0.3, 0.5)),
            durable_idle_seconds=random.choice((0.5, 5.0)),
        ),
        max_requests=scenario.max_requests + requests,
    )


def _hosts(random: Random) -> tuple[HostGroup, ...]:
    return tuple(
        HostGroup(
            name=f"h{number}",
            memory_gib=random.choice((0, 6, 8, 12)),
            program_gib=random.choice((0, 0, 1)),
            max_requests=random.choice((0, 0, 3)),
        )
        for number in range(random.randint(1, 3))
    )


def _models(random: Random, hosts: tuple[HostGroup, ...]) -> tuple[ModelKind, ...]:
    names = [host.name for host in hosts]
    local = [
        ModelKind(
            name=f"m{number}",
            hosts=tuple(random.sample(names, random.randint(1, len(names)))),
            memory_gib=random.choice((2, 3, 5)),
            load_seconds=Amount(mean=random.choice((0.5, 2.0, 6.0)), variation=random.choice((0.0, 0.3)), max=12.0),
            slots=random.choice((1, 2, 4)),
            prefill_tokens_per_second=2000.0,
            decode_tokens_per_second=random.choice((50.0, 200.0)),
            context_tokens=random.choice((0, 0, 512)),
            skills=random.choice((None, frozenset({Skill.TEXT}), frozenset({Skill.TEXT, Skill.IMAGE}))),
            loaded=random.random() < 0.4,
            pinned=random.random() < 0.1,
            keep_alive_seconds=random.choice((None, None, 3.0)),
        )
        for number in range(random.randint(1, 4))
    ]
    if random.random() < 0.5:
        local.append(ModelKind(name=CLOUD, remote=True, slots=random.choice((1, 8)), decode_tokens_per_second=100.0))
    return tuple(local)


def _bands(random: Random) -> dict[Priority, float]:
    bands = random.sample(CALLER_CLASSES, random.randint(1, len(CALLER_CLASSES)))
    shares: dict[Priority, float] = {band: random.uniform(0.2, 1.0) for band in bands}
    if random.random() < 0.05:
        shares[Priority.SYSTEM] = 0.1
    return shares


def _routes(random: Random, models: tuple[ModelKind, ...]) -> dict[str, Route]:
    if random.random() < 0.5:
        return {}
    names = [model.name for model in models]
    route = Route(
        name="best",
        candidates=tuple(random.sample(names, random.randint(1, len(names)))),
        budget_seconds=random.choice((None, 15.0)),
        keep_alive_seconds=random.choice((None, 0.0, 5.0)),
        pin_primary=random.random() < 0.3,
    )
    return {route.name: route}


def _traffic(random: Random, tenant: str, target: str, per_second: float) -> Traffic:
    return Traffic(
        tenant=tenant,
        target=target,
        rate=Rate(
            per_second=per_second,
            pattern=random.choice(tuple(Pattern)),
            factor=random.choice((1.0, 3.0)),
            period_seconds=10.0,
            high_seconds=2.0,
        ),
        prompt_tokens=Amount(mean=200.0, variation=1.0, min=1.0, max=2000.0),
        output_tokens=Amount(mean=random.choice((20.0, 100.0)), variation=0.7, min=1.0, max=400.0),
        max_output_tokens=random.choice((None, 100)),
        deadline_seconds=random.choice((None, None, 3.0, 20.0)),
        patience_seconds=random.choice((None, None, None, 4.0)),
        allow_remote=random.random() < 0.5,
        skills=frozenset({Skill.IMAGE}) if random.random() < 0.1 else frozenset(),
        sessions=random.choice((0, 3)),
        session_affinity=random.random() < 0.5,
        from_seconds=random.choice((0.0, 0.0, 4.0)),
    )


def _failures(random: Random, hosts: tuple[HostGroup, ...], duration: float) -> tuple[Failure, ...]:
    if random.random() < 0.5:
        return ()
    return tuple(
        Failure(
            mode=random.choice(tuple(FailureMode)),
            hosts=random.choice(((), (random.choice(hosts).name,))),
            at_seconds=random.uniform(0.0, duration),
            for_seconds=random.uniform(0.2, 10.0),
            share=random.choice((0.2, 1.0)),
            factor=3.0,
        )
        for _ in range(random.randint(1, 2))
    )


def _settings(random: Random, models: tuple[ModelKind, ...], tenants: tuple[Tenant, ...]) -> Settings:
    return Settings(
        pools={
            model.name: PoolSettings(
                policy=random.choice(tuple(ChoicePolicy)), max_in_flight=random.choice((0, 0, 0, 1, 3))
            )
            for model in models
        },
        tenants={
            tenant.name: TenantSettings(
                weight=random.choice((1.0, 1.0, 3.0)),
                max_in_flight=random.choice((0, 0, 1, 2)),
                allow_remote=random.choice(tuple(RemotePermission)),
            )
            for tenant in tenants
        },
    )


def _limits(random: Random) -> SchedulerLimits:
    return SchedulerLimits(
        queue_depth_per_runner=random.choice((2, 16, 100)),
        queue_timeout_seconds=random.choice((5.0, 30.0)),
        max_cold_wait_seconds=random.choice((4.0, 10.0)),
        lower_class_patience_seconds=random.choice((0.5, 5.0)),
    )


MakeScheduler = Callable[[Scenario], SchedulerPort]


def real_scheduler(scenario: Scenario) -> SchedulerPort:
    """Returns the router's own scheduler."""
    return Scheduler(scenario.limits, scenario.settings)


def check_scenario(scenario: Scenario, make: MakeScheduler = real_scheduler) -> Simulation:
    """Runs a scenario with all checks; returns the finished simulation. Raises InvariantError."""
    simulation = Simulation(scenario, make(scenario), checker=InvariantChecker(scenario))
    simulation.run()
    return simulation


def check_seed(seed: int, make: MakeScheduler = real_scheduler) -> Simulation:
    """Runs the random scenario of a seed with all checks. Its InvariantError contains the command that repeats it."""
    try:
        return check_scenario(random_scenario(seed), make)
    except Exception as error:
        again = f'PYTHONPATH=tests python -c "from kit.random_scenario import check_seed; check_seed({seed})"'
        raise InvariantError(f"seed {seed}: {error!r}; to repeat it: {again}") from error
