"""The gate itself: what it is set up with, and what it says of itself."""

import pytest
from governance_stage import LIFETIME, Stage, config, load
from kit.refusals import refused

from registry_svc.operations.governance import build_gate
from registry_svc.operations.policy.governance import Refused
from registry_svc.registry_config import GovernanceMode
from weft.api.operations.v1.operation_service_pb2 import GetGovernanceResponse
from weft_testing.fake_clock import FakeClock


def test_gate_without_previous_marks_admits_nothing() -> None:
    stage = Stage()
    stage.gate = build_gate(config(), FakeClock())
    with pytest.raises(Refused, match="earlier runs"):
        stage.admit(load(), stage.signed(load()))


def test_governance_rules_are_published_to_signers() -> None:
    rules = Stage().gate.describe()
    assert (rules.mode, rules.required_signers, list(rules.signers)) == (
        GetGovernanceResponse.MODE_SHARED_KEY,
        2,
        ["alice", "bob", "carol"],
    )
    assert rules.token_lifetime.ToSeconds() == LIFETIME


@pytest.mark.parametrize("required", [4, 0], ids=["too many", "none"])
def test_invalid_configuration_is_rejected(required: int) -> None:
    with refused(field="required_signers"):
        build_gate(config(required_signers=required), FakeClock())


@pytest.mark.parametrize("by", [("alice",), ("alice", "alice"), ("alice", "eve"), ("alice", "mallory")])
def test_too_few_eligible_signers_are_rejected(by: tuple[str, ...]) -> None:
    stage = Stage()
    assert stage.why_refused(load(), stage.signed(load(), signers=list(by))).startswith("1 of 2 signers agreed")


def test_mode_that_was_removed_refuses_every_operation() -> None:
    """A registry whose weft.yaml still says `signatures` must not become open."""
    stage = Stage({"mode": GovernanceMode.SIGNATURES, "shared_key": b""})
    for token in ("", stage.signed(load())):
        assert "signatures was removed" in stage.why_refused(load(), token)
    assert stage.gate.describe().mode == GetGovernanceResponse.MODE_SIGNATURES
