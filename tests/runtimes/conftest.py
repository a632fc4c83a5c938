"""Heavy engines, each built once into an environment of its own under .venv-runtimes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 3600.0


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """A native llama-server, built from source on first use (10 minutes on two cores)."""
    binary = ROOT / ".venv-runtimes" / "llama.cpp" / "bin" / "llama-server"
    if not binary.exists():
        if shutil.which("c++") is None:
            pytest.skip("there is no C++ compiler on this machine; the native llama-server cannot be built")
        script = Path(__file__).with_name("build_llama_server.sh")
        subprocess.run(["bash", str(script), str(binary.parent.parent)], check=True, timeout=BUILD_SECONDS)
    return binary
