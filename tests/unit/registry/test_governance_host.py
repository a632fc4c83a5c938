"""From the configuration file to the gate."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.failures import fails
from kit.refusals import refused

from registry_svc.operations.governance import ClosedGate, Gatekeeper, GovernanceGate, build_gate
from registry_svc.registry_config import GovernanceMode, GovernanceSettings
from weft_app.compose.environment import KEY_PATH_VARIABLE
from weft_app.compose.service_configs import governance_config
from weft_app.config.loader import parse_config
from weft_testing.fake_clock import FakeClock

KEY = b"0123456789abcdef0123456789abcdef-1"
OTHER_KEY = b"0123456789abcdef0123456789abcdef-2"
SIGNERS = [{"id": "alice"}, {"id": "bob", "revoked": True}]


def _section(**settings: object) -> GovernanceSettings:
    return parse_config({"registry": {"governance": settings}}).registry.governance


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    return file


def test_governance_is_off_by_default() -> None:
    config = governance_config(_section(), environment={KEY_PATH_VARIABLE: "/nowhere"})
    assert config.mode is GovernanceMode.OFF
    assert type(build_gate(config, FakeClock())) is Gatekeeper


def test_signers_come_from_the_configuration(key_file: Path) -> None:
    config = governance_config(_section(mode="shared_key", signers=SIGNERS, key_file=str(key_file)), environment={})
    assert [(signer.id, signer.revoked) for signer in config.signers] == [("alice", False), ("bob", True)]
    assert config.required_signers == 1
    assert isinstance(build_gate(config, FakeClock()), GovernanceGate)


def test_removed_mode_keeps_the_gate_closed() -> None:
    config = governance_config(_section(mode="signatures", signers=SIGNERS), environment={})
    assert isinstance(build_gate(config, FakeClock()), ClosedGate)


def test_configured_key_file_takes_precedence(tmp_path: Path, key_file: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(OTHER_KEY)
    environment = {KEY_PATH_VARIABLE: str(other)}
    named = _section(mode="shared_key", signers=SIGNERS, key_file=str(key_file))
    assert governance_config(named, environment=environment, default_key_path=other).shared_key == KEY
    unnamed = _section(mode="shared_key", signers=SIGNERS)
    assert governance_config(unnamed, environment=environment, default_key_path=key_file).shared_key == OTHER_KEY
    assert governance_config(unnamed, environment={}, default_key_path=key_file).shared_key == KEY


def test_registry_does_not_start_without_a_key(tmp_path: Path) -> None:
    section = _section(mode="shared_key", signers=SIGNERS)
    with refused(field="registry.governance.key_file"):
        governance_config(section, environment={}, default_key_path=tmp_path / "none")
    with refused(field=KEY_PATH_VARIABLE):
        governance_config(section, environment={KEY_PATH_VARIABLE: str(tmp_path / "none")})


def test_key_is_never_shown_in_text(key_file: Path) -> None:
    section = _section(mode="shared_key", signers=SIGNERS, key_file=str(key_file))
    assert KEY.decode() not in repr(governance_config(section, environment={}))


def test_manual_examples_are_valid_configurations(key_file: Path) -> None:
    manual = (Path(__file__).parents[3] / "docs" / "security.md").read_text("utf-8")
    modes = []
    for block in re.findall(r"```yaml\n(registry:\n  governance:.*?)```", manual, re.DOTALL):
        section = parse_config(yaml.safe_load(block)).registry.governance
        config = governance_config(section, environment={}, default_key_path=key_file)
        assert isinstance(build_gate(config, FakeClock()), GovernanceGate)
        modes.append(config.mode)
    assert modes == [GovernanceMode.SHARED_KEY]


def test_inaccessible_safebox_key_is_reported_without_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the folder belongs to somebody else: then not even whether the file is there can be asked."""
    place = tmp_path / "model-api.key"
    ask = os.stat

    def may_not(path: Any, *rest: Any, **more: Any) -> Any:
        if Path(path) == place:
            raise PermissionError(13, "Permission denied")
        return ask(path, *rest, **more)

    def may_not_open(self: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, f"Permission denied: {self.name}")

    monkeypatch.setattr(os, "stat", may_not)
    monkeypatch.setattr(Path, "open", may_not_open)
    section = _section(mode="shared_key", signers=SIGNERS)
    with fails(None, "cannot be read", field="registry.governance.key_file"):
        governance_config(section, environment={}, default_key_path=place)
