"""The limit of a second per test: what counts, and what does not."""

from pathlib import Path

import pytest
from kit import time_limit
from kit.time_limit import STATISTICS, Moment

pytestmark = pytest.mark.skipif(not Path(STATISTICS).exists(), reason="Linux counts the time of threads, others do not")
pytest_plugins = ("pytester",)

SUITE = """
import time

import pytest

@pytest.fixture(scope="module")
def shared():
    time.sleep(0.2)

@pytest.fixture
def own():
    time.sleep(0.6)

# Others that make this thread ten times as slow do not make it quick enough.
def test_waits(): time.sleep(0.6)
def test_computes():
    began = time.thread_time()
    while time.thread_time() < began + 0.2: pass
def test_has_a_slow_fixture(own): pass
def test_shares_one(shared): pass
@pytest.mark.main_path
def test_may(): time.sleep(0.2)
def test_hurries_the_second_time(runs=[]):
    runs.append(None)
    time.sleep(0.2 if len(runs) == 1 else 0)
def test_fails_the_second_time(runs=[]):
    runs.append(None)
    test_computes()
    assert len(runs) == 1
"""


@pytest.mark.slow("runs pytest in pytest")
def test_a_test_over_the_limit_fails_and_is_named(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "LIMIT_SECONDS", 0.05)
    pytester.makeini("[pytest]\nmarkers = main_path: may take longer")
    pytester.makepyfile(SUITE)
    result = pytester.runpytest_inprocess("-p", "kit.time_limit", "-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=6, failed=1, errors=3)
    told = result.stdout.str()
    assert [name for name in ("waits", "computes", "has_a_slow_fixture") if f"test_{name} took " not in told] == []
    assert 'mark it: @pytest.mark.slow("why it must be")' in told


def test_time_without_a_processor_does_not_count_and_waits_count_less_on_a_busy_machine() -> None:
    began = Moment(wall=10.0, running=4.0, waiting_for_processor=4.0)
    assert began.until(Moment(wall=13.0, running=5.0, waiting_for_processor=5.0)) == pytest.approx(1.0 + 1.0 / 2)
    assert Moment(0.0, 0.0, 0.0).until(Moment(3.0, 1.0, 0.0)) == pytest.approx(3.0)
