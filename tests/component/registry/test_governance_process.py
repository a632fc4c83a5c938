"""Governance as operators set it up: a configuration file, the registry's own process, and the `weft` command."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.home_gateway import home_gateway
from test_registry_process import serving
from typer.testing import CliRunner, Result

from weft_app.cli.main import app

MODEL = {"kind": "model", "name": "qwen"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def _weft(home: Path, *words: str) -> Result:
    with home_gateway(home, f"unix:{home}/run/registry.sock"):
        return CliRunner().invoke(app, words, env={"WEFT_HOME": str(home), "COLUMNS": "200"})


def _configured(folder: Path) -> Path:
    signers = []
    for name in ("alice", "bob"):
        made = _weft(folder, "keys", "sign", "new-key", "--out", str(folder / f"{name}.pem"))
        signers.append({"id": name, **yaml.safe_load(made.stdout)})
    governance = {"mode": "signatures", "required_signers": 2, "signers": signers}
    config = folder / "weft.yaml"
    config.write_text(yaml.safe_dump({"registry": {"governance": governance}}))
    (folder / "model.yaml").write_text(yaml.safe_dump(MODEL))
    return config


def _agreed(home: Path, folder: Path, token: Path) -> None:
    key = ("--key", str(folder / "alice.pem"), "--as", "alice")
    signed = _weft(home, "keys", "sign", "load", "qwen", "--ctx", "8192", *key, "--out", str(token))
    assert signed.exit_code == 0, signed.stderr
    agreed = _weft(home, "keys", "approve", str(token), "--key", str(folder / "bob.pem"), "--as", "bob", "--yes")
    assert agreed.exit_code == 0, agreed.stderr


def _whys(home: Path) -> list[str]:
    listed = _weft(home, "mesh", "audit", "list", "-o", "json")
    assert listed.exit_code == 0, listed.stderr
    entries: list[Any] = json.loads(listed.stdout)["items"]
    return [json.loads(entry["detail"])["why"] for entry in entries if entry["event"] == "operation.refused"]


@pytest.mark.slow("kills or restarts a service")
def test_token_is_single_use_across_a_registry_kill(home: Path, tmp_path: Path) -> None:
    config = _configured(tmp_path)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    load = ("load", "qwen", "--ctx", "8192", "--no-wait")
    with serving(home, config, is_killed=True):
        applied = _weft(home, "apply", "-f", str(tmp_path / "model.yaml"))
        assert applied.exit_code == 0, applied.stderr
        without = _weft(home, *load)
        assert (without.exit_code, without.stdout) == (1, "")
        assert without.stderr == "weft: refused\n"
        _agreed(home, tmp_path, first)
        _agreed(home, tmp_path, second)
        done = _weft(home, *load, "--token", str(first), "--request-id", "mine")
        assert done.exit_code == 0, (done.stderr, _whys(home))
    with serving(home, config, is_killed=True):
        again = _weft(home, *load, "--token", str(first))
        assert (again.exit_code, again.stderr) == (1, "weft: refused\n")
        same = _weft(home, *load, "--token", str(first), "--request-id", "mine")
        assert (same.exit_code, same.stdout) == (0, done.stdout)
        other = _weft(home, *load, "--token", str(second))
        assert other.exit_code == 0, "a token that was signed before the restart is as good as before"
        assert _whys(home) == ["there is no authorization", "its nonce was used before"]
