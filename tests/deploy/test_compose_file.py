"""The file of deploy/compose against the schema of Compose."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy

ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".venv-deploy" / "bin" / "check-jsonschema"
FILE = ROOT / "deploy" / "compose" / "compose.yaml"


def _faults(file: Path) -> str:
    command = [str(CHECK), "--builtin-schema", "vendor.compose-spec", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout if ended.returncode else ""


def test_the_file_is_one_of_compose() -> None:
    assert _faults(FILE) == ""


def test_a_word_that_compose_does_not_know_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("read_only:", "readonly:"))
    assert "readonly" in _faults(wrong)
