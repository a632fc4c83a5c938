"""The section `publishers` of weft.yaml."""

from pathlib import Path

import pytest

from router_svc.router_service import RouterService, build
from weft.kernel.errors.error_tree import WeftError
from weft_app.compose.home import WeftHome
from weft_app.compose.join_listeners import join_listeners
from weft_app.compose.service_configs import router_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config


def _router(config: WeftConfig) -> RouterService:
    return build(router_config(config, "unix:/registry.sock"))


def test_publishers_need_a_relay(tmp_path: Path) -> None:
    config = parse_config({"publishers": {"listen": "127.0.0.1:0"}})
    with pytest.raises(WeftError, match=r"publishers\.listen: needs relay\.listen"):
        join_listeners(config, WeftHome(tmp_path), _router(config))


def test_listener_is_absent_without_an_address(tmp_path: Path) -> None:
    config = parse_config({})
    listeners = join_listeners(config, WeftHome(tmp_path), _router(config))
    assert (listeners.relay, listeners.publishers) == (None, None)
