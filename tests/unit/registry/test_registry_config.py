"""Settings that make no sense are refused by name."""

import math
from pathlib import Path

import pytest

from registry_svc.config import RegistryConfig, RegistrySettings
from weft.kernel.errors import FieldError
from weft_app.compose.environment import allow_cloud_fallback
from weft_app.compose.home import WeftHome
from weft_app.compose.registry import registry_config
from weft_app.config.config import WeftConfig

URL = "sqlite://"


def test_the_defaults_are_those_of_the_mission() -> None:
    config = RegistryConfig(database_url=URL)
    assert (config.heartbeat_interval_seconds, config.report_interval_seconds) == (30.0, 5.0)
    assert (config.inactive_after_seconds, config.delete_after_seconds) == (90.0, 4 * 3600.0)


@pytest.mark.parametrize("field", ["delete_after_seconds", "sweep_interval_seconds", "max_runners"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_a_limit_of_nothing_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(FieldError) as refusal:
        RegistryConfig(**{"database_url": URL, field: value})  # type: ignore[arg-type] # one of many, on purpose
    assert refusal.value.field == field


def test_no_spread_is_a_choice_and_a_negative_one_is_not() -> None:
    assert RegistryConfig(database_url=URL, restart_spread_seconds=0).restart_spread_seconds == 0
    with pytest.raises(FieldError, match="restart_spread_seconds"):
        RegistryConfig(database_url=URL, restart_spread_seconds=-1)


def test_the_file_reaches_the_registry(tmp_path: Path) -> None:
    section = RegistrySettings(restart_grace_seconds=7.0, inactive_after_seconds=86_400.0)
    config = registry_config(WeftConfig(registry=section), WeftHome(tmp_path))
    assert (config.restart_grace_seconds, config.inactive_after_seconds) == (7.0, 86_400.0)


def test_no_grace_is_a_choice_but_a_negative_one_is_not() -> None:
    assert RegistryConfig(database_url=URL, restart_grace_seconds=0).restart_grace_seconds == 0
    with pytest.raises(FieldError, match="restart_grace_seconds"):
        RegistryConfig(database_url=URL, restart_grace_seconds=-1)


def test_runners_must_have_time_for_a_heartbeat_before_they_count_as_silent() -> None:
    with pytest.raises(FieldError, match="longer than heartbeat_interval_seconds"):
        RegistryConfig(database_url=URL, inactive_after_seconds=30.0)


@pytest.mark.parametrize(
    ("configured", "word", "allowed"),
    [
        (None, None, True),
        (None, "", True),
        (None, "false", False),
        (None, " OFF ", False),
        (None, "1", True),
        (False, "true", False),
        (True, "false", True),
    ],
)
def test_cloud_fallback_begins_as_the_file_says_else_the_environment_else_allowed(
    configured: bool | None, word: str | None, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_ALLOW_CLOUD_FALLBACK", raising=False)
    if word is not None:
        monkeypatch.setenv("WEFT_ALLOW_CLOUD_FALLBACK", word)
    section = RegistrySettings(allow_cloud_fallback=configured)
    assert registry_config(WeftConfig(registry=section), WeftHome(tmp_path)).allow_cloud_fallback is allowed


def test_a_word_that_is_neither_yes_nor_no_is_refused_by_the_name_of_its_variable() -> None:
    with pytest.raises(FieldError, match="must be true or false") as refusal:
        allow_cloud_fallback(None, {"WEFT_ALLOW_CLOUD_FALLBACK": "perhaps"})
    assert refusal.value.field == "WEFT_ALLOW_CLOUD_FALLBACK"


def test_no_is_a_setting_and_not_a_limit_of_nothing() -> None:
    assert not RegistryConfig(database_url=URL, allow_cloud_fallback=False).allow_cloud_fallback
