"""pytest takes the test modules that were rewritten before its start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.rewritten_modules import modules_in, rewrite

pytestmark = pytest.mark.nightly("checks the tests' own tools")

_SOURCE = "def test_it():\n    left = [1]\n    assert left == [2]\n"


def _made(folder: Path) -> Path:
    (made,) = (folder / "__pycache__").glob("*.pyc")
    return made


def test_a_module_is_rewritten_once_and_pytest_takes_that_file(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_SOURCE)
    (tmp_path / "stage.py").write_text("raise ValueError\n")
    (module,) = modules_in([tmp_path])
    assert rewrite(module)
    assert not rewrite(module)
    os.utime(_made(tmp_path), (1, 1))
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    ran = subprocess.run([*command, str(module)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "At index 0 diff: 1 != 2" in ran.stdout, "its assertions explain themselves"
    assert _made(tmp_path).stat().st_mtime == 1, "pytest would have written it anew"


def test_a_module_that_changed_is_rewritten_again(tmp_path: Path) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(_SOURCE)
    assert rewrite(module)
    module.write_text(_SOURCE + "\n")
    assert rewrite(module)
