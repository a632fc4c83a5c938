"""`weft runtime install llama_server` builds a server that decodes; a build takes minutes."""

import json
import subprocess

import pytest
from native_builds import BUILD_SECONDS, ROOT, WEFT

HOME = ROOT / ".venv-runtimes" / "llama-build"


def _weft(*words: str) -> str:
    command = [str(WEFT), "runtime", *words, "--home", str(HOME)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS).stdout


@pytest.mark.runtimes
@pytest.mark.timeout(BUILD_SECONDS)
def test_server_for_processors_is_built_and_used() -> None:
    assert "llama_server (cpu) is installed" in _weft("install", "llama_server", "--variant", "cpu")
    items = json.loads(_weft("list", "-o", "json"))["items"]
    (status,) = [each for each in items if each["name"] == "llama_server"]
    assert (status["state"], status["installed"]["variant"]) == ("installed", "cpu")
    assert "llama_server uses" in _weft("use", "llama_server", "cpu")
    assert subprocess.run([HOME / "runtimes" / "llama_server" / "bin" / "llama-server", "--version"], check=True)
