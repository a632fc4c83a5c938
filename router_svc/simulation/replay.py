"""Looking for what breaks the rules, seed by seed."""

from collections.abc import Callable

from router_svc.policy.scheduler import Scheduler
from router_svc.simulation.checks import Auditor, InvariantError
from router_svc.simulation.engine import Extras, Simulation
from router_svc.simulation.random_scenario import random_scenario
from router_svc.simulation.scenario import Scenario
from router_svc.simulation.surface import Scheduling

MakeScheduler = Callable[[Scenario], Scheduling]


def real_scheduler(scenario: Scenario) -> Scheduling:
    """The router's own."""
    return Scheduler(scenario.limits, scenario.settings)


def check_scenario(scenario: Scenario, make: MakeScheduler = real_scheduler) -> Simulation:
    """Run a scenario with every check; returns what is over. Raises InvariantError."""
    simulation = Simulation(scenario, make(scenario), Extras(auditor=Auditor(scenario)))
    simulation.run()
    return simulation


def check_seed(seed: int, make: MakeScheduler = real_scheduler) -> Simulation:
    """Run the random scenario of a seed with every check. Raises InvariantError that says how to do that again."""
    try:
        return check_scenario(random_scenario(seed), make)
    except Exception as error:
        again = f'python -c "from router_svc.simulation.replay import check_seed; check_seed({seed})"'
        raise InvariantError(f"seed {seed}: {error!r}; to see it again: {again}") from error
