"""What weft doctor makes of a registry and its standby."""

import pytest

from weft.kernel.channels.failover_channel import Reach
from weft_app.cli import doctor_checks
from weft_app.cli.doctor_checks import RegistryState, Verdict, finding_of, registry_findings

OWNER = RegistryState(address="a:1", reach=Reach.SERVING)
STANDBY = RegistryState(address="b:1", reach=Reach.NOT_SERVING, reason="standby", message="it waits")
UNFIT = RegistryState(address="b:1", reach=Reach.NOT_SERVING, reason="standby_unfit", message="another pepper")
AWAY = RegistryState(address="b:1", reach=Reach.AWAY)
SECOND_OWNER = RegistryState(address="b:1", reach=Reach.SERVING)
SILENT = RegistryState(address="b:1", reach=Reach.NOT_SERVING)


@pytest.mark.parametrize(
    ("other", "verdict", "detail"),
    [
        (STANDBY, Verdict.OK, "a:1 owns the database; b:1 is its standby"),
        (SILENT, Verdict.OK, "a:1 owns the database; b:1 does not serve"),
        (UNFIT, Verdict.WARNING, "a:1 owns the database; b:1 does not serve (another pepper)"),
        (AWAY, Verdict.WARNING, "no standby: a:1 owns the database; b:1 does not answer"),
        (SECOND_OWNER, Verdict.FAILED, "a:1 and b:1 each own a database"),
    ],
)
def test_pair_passes_if_one_owns_the_database_and_the_other_waits(
    other: RegistryState, verdict: Verdict, detail: str
) -> None:
    finding = finding_of([OWNER, other])
    assert (finding.verdict, finding.detail) == (verdict, detail)
    assert bool(finding.remedy) is (verdict is not Verdict.OK)


def test_check_fails_without_an_owner() -> None:
    finding = finding_of([STANDBY, AWAY])
    assert finding.verdict is Verdict.FAILED
    assert finding.detail.startswith("no registry serves: ")


def test_single_or_missing_address_is_not_checked_as_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def away(address: str) -> RegistryState:
        asked.append(address)
        return AWAY

    monkeypatch.setattr(doctor_checks, "_asked", away)
    assert list(registry_findings(None)) == []
    assert list(registry_findings("a:1")) == []
    assert asked == []
    assert [each.verdict for each in registry_findings("a:1,b:1")] == [Verdict.FAILED]
    assert asked == ["a:1", "b:1"]
