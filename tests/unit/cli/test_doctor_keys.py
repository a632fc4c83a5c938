"""What `weft doctor` says about the keys of models."""

from pathlib import Path

import pytest

from weft_app.cli.doctor import examine
from weft_app.cli.doctor_checks import Finding, Verdict
from weft_app.cli.network_options import NetworkOptions
from weft_app.compose.home import WeftHome

CONFIGURATION = """
runners:
  - name: cloud
    runtime: openai_remote
    models:
      - {name: large, url: https://api.example.com/v1, api_key_env: EXAMPLE_API_KEY}
      - {name: small, url: https://api.example.com/v1, api_key_env: EXAMPLE_API_KEY}
"""


def _findings(folder: Path, configuration: str = CONFIGURATION) -> dict[str, Finding]:
    path = folder / "weft.yaml"
    path.write_text(configuration, encoding="utf-8")
    return {finding.check: finding for finding in examine(WeftHome(folder / "home"), path, NetworkOptions(port=0))}


def test_missing_key_is_reported_with_its_models_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXAMPLE_API_KEY", raising=False)
    finding = _findings(tmp_path)["keys"]
    assert finding.verdict is Verdict.FAILED
    assert (
        finding.detail == "large, small: the environment variable EXAMPLE_API_KEY should contain the key, but is empty"
    )
    assert finding.remedy == "export EXAMPLE_API_KEY=... before you start weft"


def test_present_key_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", "sk-secret-words")
    findings = _findings(tmp_path)
    assert findings["keys"].verdict is Verdict.OK
    assert findings["keys"].detail == "EXAMPLE_API_KEY is set, for large, small"
    assert "sk-secret-words" not in str(findings)


def test_variables_withheld_from_engines_are_named_without_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EXAMPLE_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "sk-secret-words")
    model = "{name: qwen, path: /nowhere/qwen.gguf, environment: {HF_TOKEN: '${HF_TOKEN}'}}"
    local = f"  - {{name: local, models: [{model}]}}\n"
    findings = _findings(tmp_path, CONFIGURATION + local)
    assert findings["variables"].detail.startswith("engines of llama_server do not get: EXAMPLE_API_KEY, ")
    assert "HF_TOKEN" not in findings["variables"].detail
    assert "sk-secret-words" not in str(findings)


def test_variable_that_only_one_model_sets_is_withheld_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "sk-secret-words")
    own = "{name: qwen, path: /nowhere/qwen.gguf, environment: {HF_TOKEN: '${HF_TOKEN}'}}"
    other = "{name: llama, path: /nowhere/llama.gguf}"
    findings = _findings(tmp_path, f"runners:\n  - {{name: local, models: [{own}, {other}]}}\n")
    assert findings["variables"].detail.startswith("engines of llama_server do not get: HF_TOKEN, ")


def test_mesh_with_only_providers_needs_no_engine(tmp_path: Path) -> None:
    findings = _findings(tmp_path)
    assert "llama.cpp server" not in findings
    assert "large (a provider's)" in findings["models"].detail


def test_missing_model_file_does_not_hide_a_missing_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXAMPLE_API_KEY", raising=False)
    local = "  - {name: local, models: [{name: qwen, path: /nowhere/qwen.gguf}]}\n"
    findings = _findings(tmp_path, CONFIGURATION + local)
    assert [findings[check].verdict for check in ("loads", "keys")] == [Verdict.FAILED, Verdict.FAILED]
    assert "/nowhere/qwen.gguf" in findings["loads"].detail
