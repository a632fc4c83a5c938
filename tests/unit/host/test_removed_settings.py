"""A weft.yaml with parts that weft no longer has: they are left out and named with their replacement."""

from pathlib import Path

import pytest

from registry_svc.registry_config import GovernanceMode
from weft.kernel.errors.removed_features import RUNTIMES, SETTINGS
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.home import WeftHome
from weft_app.compose.up import UpHost
from weft_app.config.config import WeftConfig
from weft_app.config.settings_tree import names_at

ANSWERS = "{name: a, models: [{name: m, path: /m.gguf}]}"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_runner_of_a_removed_runtime_is_left_out_and_named_with_its_line(runtime: str, tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(
        f"runners:\n- {ANSWERS}\n- name: voice\n  runtime: {runtime}\n  default_voice: x\n  models: [{{name: r}}]\n"
    )
    source = ConfigurationSource(path=file)
    read = source.read()
    assert [runner.name for runner in read.runners] == ["a"]
    (message,) = read.removed
    assert message == (
        f"the runner voice (weft.yaml line 3) is not started: its runtime {runtime} was removed; "
        f"use: {RUNTIMES[runtime]}"
    )
    assert list(UpHost(source, read, WeftHome(tmp_path)).notices) == [message]


def test_only_runner_of_a_removed_runtime_is_not_replaced_by_the_demo_model(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("runners: [{name: voice, runtime: espeak_ng, models: [{name: r}]}]\n")
    read = ConfigurationSource(path=file).read()
    assert (read.runners, len(read.removed)) == ((), 1)


def test_removed_settings_are_left_out_and_named_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(
        "registry:\n  governance:\n    policyVersion: '2'\n    required_signers: 1\n    signers:\n"
        "    - {id: a, public_key: AAAA}\n    - {id: b}\n    - id: c\n      public_key: BBBB\n"
    )
    read = ConfigurationSource(path=file).read()
    assert [signer.id for signer in read.config.registry.governance.signers] == ["a", "b", "c"]
    assert [message.partition("; use: ")[0] for message in read.removed] == [
        "registry.governance.signers.*.public_key (weft.yaml line 6, weft.yaml line 9) was removed and is ignored",
        "registry.governance.policy_version (weft.yaml line 3) was removed and is ignored",
    ]


def test_removed_mode_of_governance_starts_with_a_closed_gate(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text("registry: {governance: {mode: signatures, signers: [{id: a, public_key: AAAA}]}}\n")
    read = ConfigurationSource(path=file).read()
    assert read.config.registry.governance.mode is GovernanceMode.SIGNATURES
    assert "every load, unload, pull, removal and flush is refused; use: mode: shared_key" in read.removed[-1]


@pytest.mark.parametrize("path", SETTINGS)
def test_removed_setting_is_no_setting(path: str) -> None:
    steps = [0 if step == "*" else step for step in path.split(".")]
    assert steps[-1] not in names_at(WeftConfig, steps[:-1])
    assert names_at(WeftConfig, steps[:-1])


def test_configuration_without_removed_parts_has_no_message(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(f"runners: [{ANSWERS}]\n")
    assert ConfigurationSource(path=file).read().removed == ()
