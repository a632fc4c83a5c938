"""Agents on two models that share memory, in virtual time."""

from bench.tool_pauses import Rival, Workload, World


def jobs(workload: Workload, rival: Rival) -> float:
    return World(workload, rival).run().job


def test_agents_with_short_tools_end_their_jobs_much_sooner_where_models_share_memory() -> None:
    short = Workload(pause=5.0, load=20.0)
    aware = jobs(short, Rival.WEFT)
    assert aware < 0.7 * jobs(short, Rival.UNAWARE)
    assert aware < 0.2 * jobs(short, Rival.SWITCH)


def test_tools_that_take_longer_than_loads_change_nothing() -> None:
    long = Workload(pause=60.0, load=5.0)
    assert jobs(long, Rival.WEFT) < 1.02 * jobs(long, Rival.UNAWARE)
