"""`weft runtime install llama_server` builds a server that decodes; a build takes minutes."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from native_builds import BUILD_SECONDS, ROOT, WEFT, built_llama_server, llama_cpp_variables

from runner_svc.environments.cuda_toolkit import architecture_options
from runner_svc.environments.environment import Interpreter, Variant
from runner_svc.environments.installer import PIP_OPTIONS, InstallOrder
from runner_svc.environments.locked_install import pip_arguments
from runner_svc.environments.program_build import build_program
from runner_svc.runtimes.llama_server.runtime import ENVIRONMENT
from runner_svc.supervise.child_program import run_program

HOME = ROOT / ".venv-runtimes" / "llama-build"
CUDA = ROOT / ".venv-runtimes" / "llama-cuda"
VULKAN_HOME = ROOT / ".venv-runtimes" / "llama-vulkan"
SOFTWARE_DRIVER = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
KERNEL = "ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/scale.cu.o"


def _weft(*words: str, home: Path = HOME, **variables: str) -> str:
    command = [str(WEFT), "runtime", *words, "--home", str(home)]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=BUILD_SECONDS, env=environment
    ).stdout


@pytest.mark.runtimes
@pytest.mark.timeout(BUILD_SECONDS)
def test_server_for_processors_is_built_and_used() -> None:
    # Its build fills the compiler's cache; side by side, both would compile everything.
    built_llama_server()
    assert "llama_server (cpu) is installed" in _weft(
        "install", "llama_server", "--variant", "cpu", home=HOME, **llama_cpp_variables()
    )
    items = json.loads(_weft("list", "-o", "json"))["items"]
    (status,) = [each for each in items if each["name"] == "llama_server"]
    assert (status["state"], status["installed"]["variant"]) == ("installed", "cpu")
    assert "llama_server uses" in _weft("use", "llama_server", "cpu")
    assert subprocess.run([HOME / "runtimes" / "llama_server" / "bin" / "llama-server", "--version"], check=True)


@pytest.mark.runtimes
@pytest.mark.nightly("compiles the shaders of llama.cpp")
@pytest.mark.timeout(BUILD_SECONDS)
@pytest.mark.skipif(shutil.which("glslc") is None or not SOFTWARE_DRIVER.exists(), reason="needs glslc and lavapipe")
def test_server_for_vulkan_decodes_on_the_software_driver() -> None:
    installed = _weft(
        *("install", "llama_server", "--variant", "vulkan"),
        home=VULKAN_HOME,
        VK_ICD_FILENAMES=str(SOFTWARE_DRIVER),
        GGML_VK_VISIBLE_DEVICES="0",
        **llama_cpp_variables(),
    )
    assert "llama_server (vulkan) is installed" in installed


@pytest.mark.runtimes
@pytest.mark.nightly("downloads NVIDIA's compiler, half a gigabyte")
@pytest.mark.timeout(BUILD_SECONDS)
def test_kernel_is_compiled_by_the_packages_of_nvidia() -> None:
    """The whole server takes an hour; the folder is kept, so a second run is quick."""
    build = ENVIRONMENT.variants[Variant.CUDA].build
    assert build is not None
    # As on a machine without a toolkit.
    tools = tuple(replace(tool, names=("no-nvcc",)) if tool.packages is not None else tool for tool in build.tools)
    build = replace(build, tools=tools)
    variants = {Variant.CUDA: replace(ENVIRONMENT.variants[Variant.CUDA], build=build)}
    environment = replace(ENVIRONMENT, variants=variants, program=KERNEL)
    python = CUDA / "tools" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", CUDA / "tools"], check=True)
    interpreter = Interpreter(Path(sys.executable), "3.11")
    order = InstallOrder(environment=environment, variant=Variant.CUDA, interpreter=interpreter)
    for lock in order.lock_files:
        subprocess.run([python, "-I", *pip_arguments(lock, PIP_OPTIONS)], check=True)

    async def run(command: Sequence[str | Path], read: Callable[[str], object]) -> str:
        return await run_program(command, read, variables={}, folder=CUDA)

    options = architecture_options("8.6", tuple)
    asyncio.run(build_program(environment, build, CUDA, run, partial(print), 2, options))
    assert (CUDA / "build" / KERNEL).stat().st_size > 0
