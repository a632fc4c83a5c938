"""Settings that make no sense are refused by name."""

import math
from pathlib import Path

import pytest
from kit.refusals import refused

from registry_svc.registry_config import RegistryConfig, RegistrySettings
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.environment import allow_cloud_fallback
from weft_app.compose.home import WeftHome
from weft_app.compose.service_configs import registry_config
from weft_app.config.config import WeftConfig

URL = "sqlite://"


def test_defaults_match_the_specification() -> None:
    config = RegistryConfig(database_url=URL)
    assert (config.heartbeat_interval_seconds, config.report_interval_seconds) == (30.0, 5.0)
    assert (config.inactive_after_seconds, config.delete_after_seconds) == (90.0, 4 * 3600.0)


@pytest.mark.parametrize("field", ["delete_after_seconds", "sweep_interval_seconds", "max_runners"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_zero_limit_is_refused_by_name(field: str, value: float) -> None:
    with refused(field=field):
        RegistryConfig(**{"database_url": URL, field: value})  # type: ignore[arg-type] # one of many, on purpose


def test_file_settings_reach_the_registry(tmp_path: Path) -> None:
    section = RegistrySettings(database_url=URL, restart_grace_seconds=7.0, inactive_after_seconds=86_400.0)
    config = registry_config(WeftConfig(registry=section), WeftHome(tmp_path))
    assert (config.database_url, config.restart_grace_seconds, config.inactive_after_seconds) == (URL, 7.0, 86_400.0)


@pytest.mark.parametrize("field", ["restart_grace_seconds", "restart_spread_seconds"])
def test_zero_seconds_after_a_restart_are_valid_and_negative_ones_are_refused(field: str) -> None:
    zero, negative = ({"database_url": URL, field: seconds} for seconds in (0, -1))
    assert getattr(RegistryConfig(**zero), field) == 0  # type: ignore[arg-type] # one of many, on purpose
    with pytest.raises(FieldError, match=field):
        RegistryConfig(**negative)  # type: ignore[arg-type] # one of many, on purpose


def test_inactive_limit_must_exceed_the_heartbeat_interval() -> None:
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
def test_cloud_fallback_is_set_by_file_then_environment_and_allowed_by_default(
    configured: bool | None, word: str | None, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_ALLOW_CLOUD_FALLBACK", raising=False)
    if word is not None:
        monkeypatch.setenv("WEFT_ALLOW_CLOUD_FALLBACK", word)
    section = RegistrySettings(allow_cloud_fallback=configured)
    assert registry_config(WeftConfig(registry=section), WeftHome(tmp_path)).allow_cloud_fallback is allowed


def test_invalid_boolean_error_names_its_variable() -> None:
    with pytest.raises(FieldError, match="must be true or false") as refusal:
        allow_cloud_fallback(None, {"WEFT_ALLOW_CLOUD_FALLBACK": "perhaps"})
    assert refusal.value.field == "WEFT_ALLOW_CLOUD_FALLBACK"


def test_false_is_a_setting_and_not_a_zero_limit() -> None:
    assert not RegistryConfig(database_url=URL, allow_cloud_fallback=False).allow_cloud_fallback
