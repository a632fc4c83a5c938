"""The time of a sample of an engine's figures."""

import pytest

from runner_svc.runtimes.engine_figures import with_sample_time
from weft.api.registry.v1.runner_pb2 import EngineLoad


@pytest.mark.parametrize(
    "load",
    [EngineLoad(running_count=1), EngineLoad(waiting_count=2), EngineLoad(kv_cache_share=0.5)],
    ids=["it computes", "requests wait", "its cache is used, and nothing else is known"],
)
def test_figures_of_a_busy_engine_have_a_sample_time_in_steps(load: EngineLoad) -> None:
    first, later, next_step = (with_sample_time(load, at) for at in (1000.0, 1009.9, 1010.0))
    assert first.sample_time.seconds == 1000
    assert first == later
    assert next_step != first
    first.ClearField("sample_time")
    assert first == load, "nothing else changes"


@pytest.mark.parametrize("load", [EngineLoad(), EngineLoad(running_count=0, waiting_count=0, kv_cache_share=0.9)])
def test_figures_of_an_idle_engine_have_no_sample_time(load: EngineLoad) -> None:
    assert not with_sample_time(load, 1000.0).HasField("sample_time")
