"""Every bound of the scheduler has a name in the configuration file, with the same default."""

from dataclasses import asdict, fields

import pytest

from router_svc.policy.limits import SchedulerLimits
from weft_app.compose.router import scheduler_limits
from weft_app.config.config import RouterSection
from weft_app.config.router_sections import SchedulingSection


def test_no_bound_is_without_a_name_in_the_file_and_none_is_named_twice() -> None:
    names = {field.name for field in fields(SchedulerLimits)}
    finer = set(SchedulingSection.model_fields)
    assert names == (set(RouterSection.model_fields) & names) | finer
    assert not set(RouterSection.model_fields) & finer


def test_a_file_that_says_nothing_means_the_schedulers_own_defaults() -> None:
    assert scheduler_limits(RouterSection()) == SchedulerLimits()


@pytest.mark.parametrize("name", [*(field.name for field in fields(SchedulerLimits))])
def test_what_the_file_says_arrives(name: str) -> None:
    default = asdict(SchedulerLimits())[name]
    other = default / 2 if isinstance(default, float) else default + 1
    if name == "affinity_load_factor":
        other = 2.0
    said = {name: other} if name in RouterSection.model_fields else {"scheduling": {name: other}}
    assert asdict(scheduler_limits(RouterSection.model_validate(said)))[name] == other
