"""`weft doctor` with a certificate that has expired."""

import json
from datetime import timedelta
from pathlib import Path

from typer.testing import CliRunner

from weft_app.cli.main import app
from weft_testing.certificates import Authority


def test_doctor_reports_an_expired_certificate_and_prints_no_log_lines(tmp_path: Path) -> None:
    files = Authority().issue("127.0.0.1", ends=timedelta(days=-1)).write(tmp_path)
    tls = {"certificate_file": str(files.certificate_file), "key_file": str(files.key_file)}
    config = tmp_path / "weft.yaml"
    config.write_text(json.dumps({"port": 0, "gateway": {"tls": tls}, "tls": tls, "runners": []}))
    ended = CliRunner().invoke(app, ["doctor", "-c", str(config), "--home", str(tmp_path / "home"), "-o", "json"])
    findings = {each["check"]: each for each in json.loads(ended.output)["items"]}
    assert findings["certificate"]["verdict"] == "warning"
    assert "expired on" in findings["certificate"]["detail"]
