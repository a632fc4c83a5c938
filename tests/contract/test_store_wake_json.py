"""Wake plans as they are kept: what is written today is read tomorrow."""

import json
from typing import Any

import pytest

from registry_svc.mesh.rows import plan_from_json, plan_to_json
from weft.api.registry.v1.wake_pb2 import CommandAction, HttpAction, Wake, WakeOnLanAction, WakeRecipe
from weft.kernel.timestamps import duration_of
from weft.wake.recipes import set_defaults


def wake_plan(*, by_runner: bool = False, by_mesh: WakeRecipe | None = None, seconds: float = 60.0) -> Wake:
    plan = Wake(by_runner=by_runner, by_mesh=by_mesh, max_wait=duration_of(seconds))
    set_defaults(plan)
    return plan


def http(**fields: Any) -> WakeRecipe:
    return WakeRecipe(http=HttpAction(**fields))


def packet(**fields: Any) -> WakeRecipe:
    return WakeRecipe(wake_on_lan=WakeOnLanAction(**fields))


PLANS = [
    pytest.param(wake_plan(by_runner=True), id="its runner"),
    pytest.param(wake_plan(by_runner=True, seconds=0.1), id="a fraction of a second"),
    pytest.param(
        wake_plan(by_mesh=http(url="https://h/ü?a=1", method="PUT", headers={"X": "ü\n"})),
        id="a request",
    ),
    pytest.param(
        wake_plan(by_runner=True, by_mesh=WakeRecipe(command=CommandAction(argv=("a", "", "日本")))), id="a program"
    ),
    pytest.param(
        wake_plan(
            by_mesh=packet(mac_address="aa:bb:cc:dd:ee:ff", broadcast_address="10.0.0.255", port=7),
            seconds=3600.0,
        ),
        id="a packet",
    ),
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_comes_back_as_it_was(plan: Wake) -> None:
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert text.isascii()


def test_equal_plans_are_equal_texts() -> None:
    first = wake_plan(by_mesh=http(url="http://h", headers={"A": "1", "B": "2"}))
    second = wake_plan(by_mesh=http(url="http://h", headers={"B": "2", "A": "1"}))
    assert plan_to_json(first) == plan_to_json(second)


def test_the_written_form_stays() -> None:
    plan = wake_plan(by_runner=True, by_mesh=http(url="http://h", headers={"A": "1"}), seconds=5.0)
    assert json.loads(plan_to_json(plan)) == {
        "by_runner": True,
        "max_wait_seconds": 5.0,
        "by_mesh": {"http": {"url": "http://h", "method": "POST", "headers": {"A": "1"}}},
    }


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ('{"by_runner": true, "new": [1], "max_wait_seconds": 5}', wake_plan(by_runner=True, seconds=5.0)),
        ('{"by_runner": true}', wake_plan(by_runner=True)),
        ('{"by_runner": true, "by_mesh": {"pigeon": {}}}', wake_plan(by_runner=True)),
        (
            '{"by_mesh": {"http": {"url": "http://h", "new": 1}}}',
            wake_plan(by_mesh=http(url="http://h")),
        ),
        (
            '{"by_mesh": {"wake_on_lan": {"mac_address": "m"}}}',
            wake_plan(by_mesh=packet(mac_address="m")),
        ),
        ('{"by_mesh": {"pigeon": {}}}', None),
        ("{}", None),
    ],
)
def test_older_and_newer_plans_are_read(text: str, plan: Wake | None) -> None:
    assert plan_from_json(text) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SECRET",
        "[1]",
        '"SECRET"',
        '{"by_mesh": {"http": {"SECRET": 1}}}',
        '{"by_mesh": {"http": "SECRET"}}',
        '{"by_mesh": {"command": {"argv": 1}}}',
        '{"by_runner": true, "max_wait_seconds": "SECRET"}',
    ],
)
def test_what_is_no_plan_is_an_error_that_repeats_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="not a wake plan") as failure:
        plan_from_json(text)
    assert "SECRET" not in str(failure.value)
    assert failure.value.__cause__ is None
