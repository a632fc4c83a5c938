"""The limit of a second per test: what counts, and what does not."""

from pathlib import Path

import pytest
from kit import time_limit
from kit.time_limit import STATISTICS, Moment

pytestmark = pytest.mark.skipif(not Path(STATISTICS).exists(), reason="Linux counts the time of threads, others do not")
pytest_plugins = ("pytester",)

SUITE = """
import pytest
from kit import time_limit

def wait(seconds): time_limit.clock["wall"] += seconds
def compute(seconds):
    wait(seconds)
    time_limit.clock["running"] += seconds

@pytest.fixture(scope="module")
def shared(): wait(0.2)

@pytest.fixture
def own(): wait(0.6)

def test_waits(): wait(0.6)
def test_computes(): compute(0.2)
def test_has_a_slow_fixture(own): pass
def test_shares_one(shared): pass
@pytest.mark.main_path
def test_may(): wait(0.2)
def test_hurries_the_second_time(runs=[]):
    runs.append(None)
    wait(0.2 if len(runs) == 1 else 0)
def test_fails_the_second_time(runs=[]):
    runs.append(None)
    compute(0.2)
    assert len(runs) == 1
"""


@pytest.mark.slow("runs pytest in pytest")
def test_test_over_the_time_limit_fails_and_is_reported(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the clocks of the machine, others could slow this process so much that no wait counts.
    clock = {"wall": 0.0, "running": 1.0, "waiting_for_processor": 0.0}
    monkeypatch.setattr(time_limit, "clock", clock, raising=False)
    monkeypatch.setattr(time_limit.TimeLimit, "_now", lambda _: Moment(**clock))
    monkeypatch.setattr(time_limit, "LIMIT_SECONDS", 0.05)
    pytester.makeini("[pytest]\nmarkers = main_path: may take longer")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "kit.time_limit", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=6, failed=1, errors=3)
    told = result.stdout.str()
    assert [name for name in ("waits", "computes", "has_a_slow_fixture") if f"test_{name} took " not in told] == []
    assert 'mark it: @pytest.mark.slow("why it must be")' in told


def test_time_without_cpu_is_not_counted_and_waits_count_less_under_load() -> None:
    began = Moment(wall=10.0, running=4.0, waiting_for_processor=4.0)
    assert began.until(Moment(wall=13.0, running=5.0, waiting_for_processor=5.0)) == pytest.approx(1.0 + 1.0 / 2)
    assert Moment(0.0, 0.0, 0.0).until(Moment(3.0, 1.0, 0.0)) == pytest.approx(3.0)
