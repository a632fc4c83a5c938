"""A seed replays exactly, also in another process: no decision hangs on the order of a set of strings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
SCENARIOS = 25
SAME_DECISIONS = f"""
import hashlib
from router_svc.policy.scheduler import Scheduler
from kit.random_scenario import check_seed

digest = hashlib.sha256()

def told(name):
    decide = getattr(Scheduler, name)
    def telling(*arguments, **named):
        decisions = decide(*arguments, **named)
        for each in decisions or ():
            where = getattr(getattr(each, "candidate", None), "model", "")
            digest.update(repr((type(each).__name__, getattr(each, "key", ""), getattr(each, "model", where))).encode())
        return decisions
    setattr(Scheduler, name, telling)

for name in ("apply", "submit", "report_failed", "finish", "wake_finished", "tick"):
    told(name)
for seed in range({SCENARIOS}):
    check_seed(seed)
print(digest.hexdigest())
"""


def _decided(hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(TESTS)}
    run = subprocess.run(
        [sys.executable, "-c", SAME_DECISIONS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.nightly("replays 25 scenarios in two Pythons")
def test_queues_changed_together_are_processed_in_the_same_order_in_every_process() -> None:
    assert len({_decided(hash_seed) for hash_seed in (1, 2)}) == 1
