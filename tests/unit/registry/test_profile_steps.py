"""What a switch to a profile unloads and loads."""

import pytest

from registry_svc.mesh.policy.profile_steps import WantedModels, differences, plan_steps


def words(wanted: WantedModels, loaded: dict[str, str], *as_wanted: str) -> list[str]:
    return [f"{step.kind.name.lower()} {step.model}" for step in plan_steps(wanted, loaded, as_wanted)]


def test_unloads_precede_loads_and_loads_keep_the_profile_order() -> None:
    wanted = WantedModels(load=["b", "a"], unload=["z", "y"])
    assert words(wanted, {"y": "", "z": ""}) == ["unload y", "unload z", "load b", "load a"]


def test_matching_loaded_model_is_kept_and_one_with_other_settings_is_reloaded() -> None:
    assert words(WantedModels(load=["a", "b"]), {"a": "", "b": ""}, "a") == ["load b"]


@pytest.mark.parametrize(("others", "expected"), [(False, []), (True, ["unload x"])])
def test_unlisted_model_is_unloaded_only_if_the_profile_requests_it(others: bool, expected: list[str]) -> None:
    assert words(WantedModels(load=["a"], unload_others=others), {"a": "", "x": ""}, "a") == expected


def test_unload_of_an_unloaded_model_is_skipped() -> None:
    assert words(WantedModels(load=[], unload=["x"]), {}) == []


def test_adapter_stays_loaded_with_its_base_model() -> None:
    loaded = {"base": "", "adapter": "base"}
    assert words(WantedModels(load=["base"], unload_others=True), loaded, "base") == []
    assert words(WantedModels(load=["adapter"], unload_others=True), loaded, "adapter") == []


def test_differences_list_extra_and_missing_models() -> None:
    wanted = WantedModels(load=["a", "b"], unload_others=True)
    assert differences(wanted, {"a": "", "x": ""}) == ["model/x is loaded", "model/b is not loaded"]
