"""The section `publishers` of weft.yaml, with the extension on and off."""

from pathlib import Path
from typing import Any

import pytest

from router_svc.router_service import build
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.doctor import _extensions
from weft_app.cli.doctor_checks import Finding, Verdict, port_findings
from weft_app.compose.home import WeftHome
from weft_app.compose.join_listeners import JoinListeners, join_listeners
from weft_app.compose.service_configs import router_config
from weft_app.config.loader import parse_config

SET: dict[str, Any] = {"publishers": {"listen": "127.0.0.1:0"}}
OFF = {"extensions": {"disabled": ["publishers"]}}
WHY = "publishers.listen is set, but belongs to the extension publishers, which is off: extensions.disabled names it"


def _listeners(folder: Path, document: dict[str, Any]) -> JoinListeners:
    config = parse_config(document)
    return join_listeners(config, WeftHome(folder), build(router_config(config, "unix:/registry.sock")))


def test_publishers_need_a_relay(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"publishers\.listen: needs relay\.listen"):
        _listeners(tmp_path, SET)


def test_listener_is_absent_without_an_address(tmp_path: Path) -> None:
    listeners = _listeners(tmp_path, {})
    assert (listeners.relay, listeners.added, listeners.notices) == (None, [], [])


@pytest.mark.parametrize("relay", [{}, {"relay": {"listen": "127.0.0.1:0"}}], ids=["no relay", "relay"])
def test_listener_of_a_disabled_extension_is_absent_and_named(tmp_path: Path, relay: dict[str, Any]) -> None:
    listeners = _listeners(tmp_path, SET | OFF | relay)
    assert listeners.added == []
    assert listeners.notices == [WHY]


def test_doctor_names_a_listener_of_a_disabled_extension_and_checks_no_port_of_it() -> None:
    config = parse_config({"publishers": {"listen": "127.0.0.1:1"}} | OFF)
    assert Finding("extensions", Verdict.WARNING, WHY, "remove it from extensions.disabled") in _extensions(config)
    assert not [each for each in port_findings(config, None) if "publishers" in each.detail]
