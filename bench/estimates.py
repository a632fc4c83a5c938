"""How true the shown waits are: `python -m bench.estimates [HOURS]`. Prints a table; asserts nothing.

Some hours of each example scenario (`lab` is a day in half an hour) run in virtual time against the router's own
scheduler. The first estimate that a request is shown is compared with how long it then really waited. Lengths of
answers are random and unknown to the scheduler, as in life: no estimate can be exact.
"""

import sys
from dataclasses import replace
from pathlib import Path

from router_svc.policy.scheduler import Scheduler
from router_svc.simulation.engine import Simulation
from router_svc.simulation.figures import Figures, figures_of
from weft_app.config.scenario import load_scenario

SCENARIOS = Path(__file__).resolve().parent.parent / "examples" / "scenarios"
NAMES = ("lab", "three-tenants", "gaming-pc-and-two-laptops", "laptop", "outage", "overload")
USUAL_HOURS = 3.0
GOAL = 0.25
"""Median error of an estimate, as a share of the wait that it was for."""


def main(seconds: float) -> None:
    """Prints a row per scenario."""
    print("| scenario | hours | requests | estimates | error p50 | p95 | in seconds p50 | p95 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in NAMES:
        scenario = replace(load_scenario(SCENARIOS / f"{name}.yaml"), duration_seconds=seconds)
        simulation = Simulation(scenario, Scheduler(scenario.limits, scenario.settings))
        simulation.run(lambda: None)
        print(_row(name, figures_of(simulation), len(simulation.metrics.estimate_errors)))


def _row(name: str, figures: Figures, estimates: int) -> str:
    shares, errors = figures.estimate_error_shares, figures.estimate_errors
    hours = f"{figures.simulated_seconds / 3600:.1f}"
    if shares is None or errors is None:
        return f"| {name} | {hours} | {figures.total.requests:,} | 0 | - | - | - | - |"
    verdict = "" if shares.p50 < GOAL else f" (goal {GOAL:.0%})"
    off = f"{shares.p50:.0%}{verdict} | {shares.p95:.0%} | {errors.p50:.1f} | {errors.p95:.1f}"
    return f"| {name} | {hours} | {figures.total.requests:,} | {estimates:,} | {off} |"


if __name__ == "__main__":
    main(3600.0 * (float(sys.argv[1]) if len(sys.argv) > 1 else USUAL_HOURS))
