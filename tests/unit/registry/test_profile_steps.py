"""What a switch to a profile unloads and loads."""

import pytest

from registry_svc.mesh.policy.profile_steps import WantedModels, differences, plan_steps


def words(wanted: WantedModels, loaded: dict[str, str], *as_wanted: str) -> list[str]:
    return [f"{step.kind.name.lower()} {step.model}" for step in plan_steps(wanted, loaded, as_wanted)]


def test_what_is_unloaded_comes_before_what_is_loaded_and_loads_keep_the_profiles_order() -> None:
    wanted = WantedModels(load=["b", "a"], unload=["z", "y"])
    assert words(wanted, {"y": "", "z": ""}) == ["unload y", "unload z", "load b", "load a"]


def test_a_model_that_is_loaded_as_wanted_is_left_alone_and_one_with_other_settings_is_loaded_again() -> None:
    assert words(WantedModels(load=["a", "b"]), {"a": "", "b": ""}, "a") == ["load b"]


@pytest.mark.parametrize(("others", "expected"), [(False, []), (True, ["unload x"])])
def test_a_model_that_is_not_named_is_unloaded_only_where_the_profile_says_so(
    others: bool, expected: list[str]
) -> None:
    assert words(WantedModels(load=["a"], unload_others=others), {"a": "", "x": ""}, "a") == expected


def test_a_model_that_is_to_be_unloaded_and_is_not_loaded_needs_nothing() -> None:
    assert words(WantedModels(load=[], unload=["x"]), {}) == []


def test_an_adapter_stays_with_the_model_whose_engine_serves_it() -> None:
    loaded = {"base": "", "adapter": "base"}
    assert words(WantedModels(load=["base"], unload_others=True), loaded, "base") == []
    assert words(WantedModels(load=["adapter"], unload_others=True), loaded, "adapter") == []


def test_differences_name_what_is_loaded_and_should_not_be_and_the_reverse() -> None:
    wanted = WantedModels(load=["a", "b"], unload_others=True)
    assert differences(wanted, {"a": "", "x": ""}) == ["model/x is loaded", "model/b is not loaded"]
