"""From the configuration to a router's own."""

import pytest

from router_svc.registry_session import default_router_name
from weft.kernel.values.names import is_name
from weft_app.compose.service_configs import router_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


def test_wake_recipe_kinds_reach_the_router_and_commands_are_off_by_default() -> None:
    assert router_config(WeftConfig(), "unix:/registry").wake_recipes == {"wake_on_lan", "http"}
    config = parse_config({"router": {"wake_recipes": ["command"]}})
    assert router_config(config, "unix:/registry").wake_recipes == {"command"}


def test_recipes_see_only_the_search_path_and_their_own_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_WAKE_TOKEN", "for-recipes")
    monkeypatch.setenv("WEFT_SECRET", "not-for-recipes")
    config = router_config(WeftConfig(), "unix:/registry")
    assert config.wake_environment["WEFT_WAKE_TOKEN"] == "for-recipes"
    assert "WEFT_SECRET" not in config.wake_environment
    assert "for-recipes" not in repr(config)


def test_unnamed_router_keeps_its_machine_and_address_name_across_restarts() -> None:
    name = default_router_name("Gaming-PC.lan", "unix:/run/router.sock")
    assert name == default_router_name("gaming-pc", "unix:/run/router.sock")
    assert name.startswith("router-gaming-pc-")
    assert name != default_router_name("gaming-pc", "gaming-pc:7071")
    assert is_name(default_router_name("…", "a"))
    assert is_name(default_router_name("x" * 300, "a"))


def test_router_participates_under_its_configured_name_only_with_an_address() -> None:
    config = parse_config({"router": {"name": "left"}})
    assert router_config(config, "unix:/registry", "unix:/router").name == "left"
    assert router_config(config, "unix:/registry").name == ""
