"""What a switch to a profile unloads and loads."""

from collections.abc import Sequence

import pytest

from registry_svc.mesh.profile_state import differences, plan_steps
from weft.api.registry.v1.profile_pb2 import ProfileLoad, ProfileManifest
from weft.documents.codec import word_of


def wanted(load: Sequence[str], unload: Sequence[str] = (), *, unload_others: bool = False) -> ProfileManifest:
    loads = [ProfileLoad(model=model) for model in load]
    return ProfileManifest(load=loads, unload=unload, unload_others=unload_others)


def words(profile: ProfileManifest, loaded: dict[str, str], *as_wanted: str) -> list[str]:
    return [f"{word_of(step, 'kind')} {step.model}" for step in plan_steps(profile, loaded, as_wanted)]


def test_unloads_precede_loads_and_loads_keep_the_profile_order() -> None:
    profile = wanted(load=["b", "a"], unload=["z", "y"])
    assert words(profile, {"y": "", "z": ""}) == ["unload y", "unload z", "load b", "load a"]


def test_matching_loaded_model_is_kept_and_one_with_other_settings_is_reloaded() -> None:
    assert words(wanted(load=["a", "b"]), {"a": "", "b": ""}, "a") == ["load b"]


@pytest.mark.parametrize(("others", "expected"), [(False, []), (True, ["unload x"])])
def test_unlisted_model_is_unloaded_only_if_the_profile_requests_it(others: bool, expected: list[str]) -> None:
    assert words(wanted(load=["a"], unload_others=others), {"a": "", "x": ""}, "a") == expected


def test_unload_of_an_unloaded_model_is_skipped() -> None:
    assert words(wanted(load=[], unload=["x"]), {}) == []


def test_adapter_stays_loaded_with_its_base_model() -> None:
    loaded = {"base": "", "adapter": "base"}
    assert words(wanted(load=["base"], unload_others=True), loaded, "base") == []
    assert words(wanted(load=["adapter"], unload_others=True), loaded, "adapter") == []


def test_differences_list_extra_and_missing_models() -> None:
    profile = wanted(load=["a", "b"], unload_others=True)
    assert differences(profile, {"a": "", "x": ""}) == ["model/x is loaded", "model/b is not loaded"]
