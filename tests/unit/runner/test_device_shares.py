"""The shares of requests in the work of accelerators, by hand-computed cases and by properties."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy import device_shares
from runner_svc.policy.device_shares import (
    DeviceSample,
    EngineCall,
    Gap,
    Share,
    over_devices,
)

ENGINES = frozenset({"tiny"})


@dataclass(eq=False, kw_only=True)
class Call(EngineCall):
    key: object


def shares_of_interval(first: DeviceSample, last: DeviceSample, calls: Sequence[Call]) -> dict[object, Share]:
    return {each.key: share for each, share in device_shares.shares_of_interval(first, last, calls).items()}


def shares_of_calls(samples: Sequence[DeviceSample], calls: Sequence[Call]) -> dict[object, Share]:
    """Returns each call's share from the first to the last sample."""
    shares: dict[object, Share] = {}
    for first, last in pairwise(samples):
        for key, share in shares_of_interval(first, last, calls).items():
            shares[key] = shares[key].plus(share) if key in shares else share
    return shares


def sample(at: float, utilization: float | None = 1.0, energy: int | None = 0, **other: Any) -> DeviceSample:
    words: dict[str, Any] = {"engines": ENGINES, "is_private": True} | other
    return DeviceSample(at=at, utilization=utilization, energy_millijoules=energy, **words)


def call(key: str, began: float, ended: float | None = None, engine: str = "tiny") -> Call:
    return Call(key=key, engine=engine, began=began, ended=ended)


def test_single_call_is_charged_for_all_work_of_its_interval() -> None:
    shares = shares_of_interval(sample(10.0), sample(12.0, 0.75, 800), [call("a", 5.0)])
    assert shares == {"a": Share(seconds=1.5, millijoules=800.0, sampled_seconds=2.0)}


def test_concurrent_calls_split_it_evenly() -> None:
    shares = shares_of_interval(sample(0.0), sample(1.0, 1.0, 300), [call(key, 0.0) for key in "abc"])
    assert [share.seconds for share in shares.values()] == pytest.approx([1 / 3] * 3)
    assert [share.millijoules for share in shares.values()] == pytest.approx([100.0] * 3)


def test_call_is_charged_only_for_its_part_of_the_interval() -> None:
    # 0 to 4 s with use 1: a alone for 1 s, a and b for 2 s, b alone for 1 s.
    shares = shares_of_interval(sample(0.0), sample(4.0, 1.0, 4_000), [call("a", 0.0, 3.0), call("b", 1.0)])
    assert shares["a"] == Share(seconds=2.0, millijoules=2_000.0, sampled_seconds=3.0)
    assert shares["b"] == Share(seconds=2.0, millijoules=2_000.0, sampled_seconds=3.0)


def test_device_work_is_attributed_only_to_times_with_calls() -> None:
    # Half of 1 s busy, and a call in the last 0.5 s: all of it is the call's; of the energy, what the time says.
    shares = shares_of_interval(sample(0.0), sample(1.0, 0.5, 100), [call("a", 0.5)])
    assert shares["a"] == Share(seconds=0.5, millijoules=50.0, sampled_seconds=0.5)


def test_call_is_never_charged_more_than_its_time() -> None:
    shares = shares_of_interval(sample(0.0), sample(1.0, 1.0), [call("a", 0.9)])
    assert shares["a"].seconds == pytest.approx(0.1)


def test_shares_are_unknown_without_driver_figures() -> None:
    assert shares_of_interval(sample(0.0), sample(1.0, None), [call("a", 0.0)]) == {}
    assert shares_of_interval(sample(0.0), sample(1.0, 1.0, None), [call("a", 0.0)])["a"].millijoules is None
    assert shares_of_interval(sample(0.0, 1.0, 500), sample(1.0, 1.0, 20), [call("a", 0.0)])["a"].millijoules is None, (
        "the counter began again"
    )


@pytest.mark.parametrize("at", [0, 1], ids=["first", "last"])
def test_foreign_process_at_either_end_makes_the_interval_unknown(at: int) -> None:
    samples = [sample(0.0), sample(1.0)]
    samples[at] = replace(samples[at], is_private=False)
    share = shares_of_interval(samples[0], samples[1], [call("a", 0.0)])["a"]
    assert (share.gap, share.seconds) == (Gap.FOREIGN_PROCESS, 0.0)


def test_engine_not_listed_by_the_driver_is_charged_nothing() -> None:
    share = shares_of_interval(sample(0.0), sample(1.0, engines=frozenset()), [call("a", 0.0)])["a"]
    assert share.gap is Gap.FOREIGN_PROCESS, "something computes there, and it cannot be seen"


def test_two_concurrent_engines_are_unknown_and_sequential_ones_are_not() -> None:
    both = frozenset({"tiny", "other"})
    ends = sample(0.0, engines=both), sample(1.0, 1.0, engines=both)
    shares = shares_of_interval(*ends, [call("a", 0.0), call("b", 0.0, engine="other")])
    assert {share.gap for share in shares.values()} == {Gap.OTHER_MODEL}
    shares = shares_of_interval(*ends, [call("a", 0.0, 0.5), call("b", 0.5, engine="other")])
    assert {share.gap for share in shares.values()} == {Gap.NONE}
    assert [share.seconds for share in shares.values()] == [0.5, 0.5]


def test_gap_in_one_interval_or_device_is_a_gap_of_the_request() -> None:
    known, unknown = Share(seconds=1.0), Share(gap=Gap.OTHER_MODEL)
    assert over_devices([known, known]).seconds == 2.0
    assert over_devices([known, unknown]) == Share(gap=Gap.OTHER_MODEL)


@pytest.mark.parametrize(("sampled", "is_known"), [(0.0, False), (0.79, False), (0.8, True), (1.0, True)])
def test_barely_sampled_call_has_no_share(sampled: float, is_known: bool) -> None:
    share = Share(seconds=0.5, sampled_seconds=sampled).known_for(1.0)
    assert (share.gap is Gap.NONE) is is_known
    assert Share().known_for(0.0).gap is Gap.NOT_SAMPLED


def _times(count: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0.0, 100.0), min_size=count, max_size=12, unique=True).map(sorted)


@st.composite
def _scene(draw: st.DrawFn) -> tuple[list[DeviceSample], list[Call]]:
    energy, samples = 0, []
    for at in draw(_times(2)):
        energy += draw(st.integers(0, 10_000))
        samples.append(
            DeviceSample(
                at=at,
                utilization=draw(st.none() | st.floats(0.0, 1.0)),
                energy_millijoules=draw(st.sampled_from((None, energy, energy))),
                engines=frozenset({"a", "b"}),
                is_private=draw(st.sampled_from((True, True, False))),
            )
        )
    calls = []
    for key in range(draw(st.integers(1, 6))):
        began = draw(st.floats(0.0, 100.0))
        ended = draw(st.none() | st.floats(0.0, 50.0).map(began.__add__))
        calls.append(Call(key=key, engine=draw(st.sampled_from("ab")), began=began, ended=ended))
    return samples, calls


@given(_scene())
def test_shares_never_exceed_the_device_total(scene: tuple[list[DeviceSample], list[Call]]) -> None:
    samples, calls = scene
    shares = shares_of_calls(samples, calls)
    pairs = list(pairwise(samples))
    busy = sum((last.utilization or 0.0) * (last.at - first.at) for first, last in pairs)
    energy = max(0, *(each.energy_millijoules or 0 for each in samples))
    assert sum(share.seconds for share in shares.values()) <= busy + 1e-6
    assert sum(share.millijoules or 0.0 for share in shares.values()) <= energy + 1e-3
    for each in calls:
        share = shares.get(each.key, Share())
        until = samples[-1].at if each.ended is None else each.ended
        assert -1e-9 <= share.seconds <= share.sampled_seconds + 1e-6
        assert share.sampled_seconds <= max(0.0, until - each.began) + 1e-6
