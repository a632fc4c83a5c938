"""What the tests of heavy runtimes run on, built from source on first use into `.venv-runtimes`."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 3600.0
LLAMA_CPP = ROOT / ".venv-runtimes" / "llama.cpp"
LIBRARY_ENVIRONMENT = ROOT / ".venv-runtimes" / "llama-cpp-python"


def built_llama_server() -> Path:
    """The native llama-server, with its libraries beside it (10 minutes on two cores)."""
    binary = LLAMA_CPP / "bin" / "llama-server"
    if not binary.exists():
        _build("build_llama_server.sh", LLAMA_CPP)
    return binary


def built_llama_cpp_python() -> Path:
    """The interpreter of an environment that has llama-cpp-python, over the same libraries (seconds more)."""
    built_llama_server()
    if not (LIBRARY_ENVIRONMENT / "complete").exists():
        _build("build_llama_cpp_python.sh", LLAMA_CPP, LIBRARY_ENVIRONMENT)
    return LIBRARY_ENVIRONMENT / "bin" / "python"


def _build(script: str, *arguments: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("there is no C++ compiler on this machine; llama.cpp cannot be built")
    command = ["bash", str(Path(__file__).with_name(script)), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS)
