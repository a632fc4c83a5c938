"""How long configured certificates are valid: the words, the warnings, health, and the metric."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from weft.kernel.services.health import HealthState
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft_app.cli.doctor_checks import Verdict, certificate_findings
from weft_app.compose.certificate_expiry import CertificateExpiry, expiry_words
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config
from weft_testing.certificates import Authority

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def configured(folder: Path, **ends: timedelta) -> WeftConfig:
    """A configuration whose edge and relay have certificates that end after a time."""
    ca, sections = Authority(), dict[str, dict[str, str]]()
    for name, end in ends.items():
        files = ca.issue("host", begins=timedelta(days=-90), ends=end).write(folder, name=name)
        sections[name] = {"certificate_file": str(files.certificate_file), "key_file": str(files.key_file)}
    return parse_config({"gateway": {"tls": sections["edge"]}, "relay": sections.get("relay", {})})


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (timedelta(days=5, hours=1), "expires in 5 days (2026-12-04)"),
        (timedelta(days=1, hours=1), "expires tomorrow (2026-11-30)"),
        (timedelta(hours=3), "expires within a day (2026-11-29)"),
        (timedelta(0), "expired on 2026-11-29"),
        (timedelta(days=-2), "expired on 2026-11-27"),
    ],
)
def test_rest_of_a_validity_period_is_told_in_days(left: timedelta, words: str) -> None:
    assert expiry_words(NOW + left, NOW) == words


def test_certificate_that_ends_soon_is_in_the_start_health_doctor_and_metrics(tmp_path: Path) -> None:
    config = configured(tmp_path, edge=timedelta(days=2, hours=1), relay=timedelta(days=60))
    expiry = CertificateExpiry(config)
    (sentence,) = expiry.warnings(datetime.now(UTC))
    assert sentence.startswith("gateway.tls.certificate_file: the certificate expires in 2 days (")
    (check,) = expiry.health_checks()
    look = check.probe()
    assert getattr(look, "state", None) is HealthState.DEGRADED
    assert not check.is_essential
    findings = [(each.verdict, each.detail.split(" (")[0]) for each in certificate_findings(config)]
    assert findings == [
        (Verdict.WARNING, "gateway.tls.certificate_file expires in 2 days"),
        (Verdict.OK, "relay.certificate_file expires in 59 days"),
    ]
    page = MetricsPage()
    expiry.add_metrics(page)
    (family,) = page.collect()
    ends = {sample.labels["setting"]: sample.value for sample in family.samples}
    assert ends["gateway.tls.certificate_file"] == pytest.approx(
        (datetime.now(UTC) + timedelta(days=2.04)).timestamp(), abs=600
    )
    assert len(ends) == 2


def test_replaced_file_is_read_again(tmp_path: Path) -> None:
    config = configured(tmp_path, edge=timedelta(days=-1))
    expiry = CertificateExpiry(config)
    assert "expired on" in expiry.warnings(datetime.now(UTC))[0]
    configured(tmp_path, edge=timedelta(days=60))
    assert expiry.warnings(datetime.now(UTC)) == []


def test_mesh_without_configured_certificates_has_no_check() -> None:
    expiry = CertificateExpiry(parse_config({}))
    assert list(expiry.health_checks()) == []
    assert expiry.warnings(NOW) == []
