"""What `weft up` refuses `weft doctor` refuses as well, in the same words; what starts has no failed finding."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from mesh_process import fake_runner, run_weft, running_mesh, write_config

from weft_app.cli.doctor import examine
from weft_app.cli.doctor_checks import Finding, Verdict
from weft_app.cli.network_options import NetworkOptions
from weft_app.compose.home import WeftHome

MISSING = "/nowhere/model.gguf"
REFUSED: dict[str, Any] = {
    "a missing file": {"runners": [{"name": "a", "models": [{"name": "m", "path": MISSING}]}]},
    "a misspelt setting": {"prot": 8080},
    "a number out of range": {"port": 99_999},
    "two errors at once": {"port": 99_999, "drain_seconds": -1},
    "no keys beyond loopback": {"host": "0.0.0.0", "auth": {"required": False}},
    "no certificate beyond loopback": {"host": "0.0.0.0", "gateway": {"tls": {"self_signed": False}}},
    "two ways of TLS": {"gateway": {"insecure": True, "tls": {"self_signed": True}}},
    "an unknown host": {"host": "nowhere.invalid"},
    "a certificate that is not there": {"gateway": {"tls": {"certificate_file": "/no.pem", "key_file": "/no.key"}}},
    "one name twice": {"runners": [fake_runner("a"), fake_runner("a")]},
    "governance without a key": {"registry": {"governance": {"mode": "shared_key", "key_file": "/nowhere.key"}}},
    "an environment that is not installed": {
        "runners": [{"name": "a", "runtime": "ctranslate2", "models": [{"name": "m", "path": os.sep}]}]
    },
    "a key that is not set": {
        "runners": [
            {
                "name": "a",
                "runtime": "openai_http",
                "models": [{"name": "m", "url": "http://127.0.0.1:1/v1", "api_key_env": "WEFT_TEST_NO_SUCH_KEY"}],
            }
        ]
    },
}


def _failed(folder: Path, config: Path) -> list[Finding]:
    found = examine(WeftHome(folder / "doctors-home"), config, NetworkOptions())
    return [finding for finding in found if finding.verdict is Verdict.FAILED]


@pytest.mark.parametrize("case", REFUSED)
async def test_doctor_reports_the_same_errors_as_up(tmp_path: Path, case: str) -> None:
    config = tmp_path / "weft.yaml"
    config.write_text(yaml.safe_dump(REFUSED[case]))
    code, out, error = await run_weft("up", "--config", str(config), home=tmp_path / "home")
    assert code != 0
    assert "weft is up" not in out
    refusal = "weft: ".join(error.partition("weft: ")[2:]).strip().splitlines()[0].removeprefix("weft: ")
    # Of a model that its runner refuses, the terminal names the log besides.
    refusal = refusal.partition(" does not start on a: ")[2].partition("; ")[0] or refusal
    refusal = refusal.removeprefix("runners.a: ").partition(" --home ")[0]  # the doctor has another home
    findings = _failed(tmp_path, config)
    assert any(refusal in finding.detail for finding in findings), (refusal, findings)
    assert any(str(config) in finding.detail for finding in findings if finding.check == "configuration") or not any(
        finding.check == "configuration" for finding in findings
    )


async def test_doctor_has_no_failed_finding_for_the_config_of_a_running_mesh(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    assert _failed(tmp_path, config) == []
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        out = await mesh.weft("doctor")
        assert str(config) in out
