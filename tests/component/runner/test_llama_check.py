"""The check of a llama-server that was built, as the installer runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner_svc.environments import llama_check
from runner_svc.runtimes.llama_server.runtime import LAUNCHER

# The server of the wheel does not know the last two options, --no-warmup and --verbose.
REAL = f"""#!{sys.executable}
import os, sys
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", {LAUNCHER!r}, *sys.argv[1:-2]])
"""
BROKEN = "#!/bin/sh\nseq 40; exit 3\n"

pytestmark = pytest.mark.slow("starts a real engine")


def _checked(folder: Path, script: str, variant: str = "cpu") -> subprocess.CompletedProcess[str]:
    program = folder / "llama-server"
    program.write_text(script)
    program.chmod(0o755)
    command = [sys.executable, "-I", llama_check.__file__, str(program), variant]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_server_that_decodes_passes(tmp_path: Path) -> None:
    # An empty text as exit status was 1, so that no build was ever used.
    ended = _checked(tmp_path, REAL)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_server_without_the_device_of_its_variant_fails(tmp_path: Path) -> None:
    ended = _checked(tmp_path, REAL, "vulkan")
    assert ended.returncode == 1
    assert ended.stderr.endswith("\nit decodes, but on no vulkan device\n")


def test_reason_of_a_failed_check_was_before_the_lines_that_are_kept(tmp_path: Path) -> None:
    ended = _checked(tmp_path, BROKEN)
    said = [*map(str, range(41 - llama_check.MAX_LOG_LINES, 41)), "it ended with code 3"]
    assert (ended.returncode, ended.stderr.splitlines()) == (1, said)
