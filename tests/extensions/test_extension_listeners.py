"""The listeners of extensions: made where the mesh has a relay, started after it, absent if their extension is off."""

from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from router_svc.router_service import build
from weft import extension
from weft.extension import Extension, ListenerHook
from weft_app.compose.home import WeftHome
from weft_app.compose.join_listeners import JoinListener, JoinListeners, JoinParts, join_listeners
from weft_app.compose.service_configs import router_config
from weft_app.config.loader import parse_config

RELAY = {"relay": {"listen": "127.0.0.1:0"}}


class Gate(JoinListener):
    """A listener of another package."""

    def __init__(self, parts: JoinParts) -> None:
        self._parts = parts

    @override
    async def start(self) -> None:
        self.url = f"gate:{self._parts.relay_listener.private_address}"

    @override
    async def stop(self, grace_seconds: float) -> None:
        self.url = ""


def gate(parts: JoinParts) -> JoinListener | None:
    """Returns the listener, in homes with a file `gate`."""
    return Gate(parts) if (parts.home.root / "gate").exists() else None


def listeners_of(
    monkeypatch: pytest.MonkeyPatch, home: Path, document: dict[str, Any], place: str = "gate", setting: str = ""
) -> JoinListeners:
    """Returns the listeners of a router of which one extension adds one."""
    hook = ListenerHook(place=f"{__name__}:{place}", setting=setting, label="gate", summary="friends come in")
    added = Extension(name="gate", summary="A gate.", docs="docs/extensions.md", listeners=(hook,))
    monkeypatch.setattr(extension, "all_extensions", lambda: (added,))
    config = parse_config(document)
    return join_listeners(config, WeftHome(home), build(router_config(config, "unix:/registry.sock")))


async def test_a_listener_starts_after_the_relay_whose_private_address_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = WeftHome(tmp_path)
    home.root.joinpath("gate").touch()
    home.run.mkdir(parents=True)
    listeners = listeners_of(monkeypatch, tmp_path, RELAY)
    await listeners.start()
    try:
        assert listeners.added == [("gate", f"friends come in at gate:{home.address('relay')}")]
    finally:
        await listeners.stop(0.0)


def test_a_listener_that_is_not_wanted_leaves_the_relay_without_a_private_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = listeners_of(monkeypatch, tmp_path, RELAY)
    assert listeners.added == []
    assert listeners.relay is not None
    assert not listeners.relay.has_private_address


@pytest.mark.parametrize(
    "document",
    [
        RELAY | {"extensions": {"disabled": ["gate"]}, "publishers": {"listen": "127.0.0.1:0"}},
        RELAY,
        {},
    ],
    ids=["off", "setting is not set", "no relay"],
)
def test_a_listener_that_cannot_be_used_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> None:
    assert listeners_of(monkeypatch, tmp_path, document, "no_such_function", "publishers.listen").added == []
