"""The native builds are for a named baseline of processors, and an earlier build is not taken for one of them."""

import re
import subprocess
from pathlib import Path

import pytest
from kit.engine_settings import engine_settings
from native_builds import (
    LLAMA_CPP,
    RECIPE,
    SERVER_SCRIPTS,
    built_llama_cpp_python,
    built_llama_server,
    is_built_by,
    recipe_of,
)

from runner_svc.environments.environment import Variant
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import ENVIRONMENT, LlamaServerModel
from weft_app.compose.demo import demo_model_path

BASELINE = {"SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2"}
"""What ggml prints of the instruction sets that it was compiled for, as "NAME = 1"."""
BEYOND = re.compile(r"AMX|AVX512|AVX_VNNI")
_FEATURE = re.compile(r"(\w+) = 1\b")


def test_incomplete_build_or_one_with_other_flags_or_versions_is_not_used(tmp_path: Path) -> None:
    script, folder = tmp_path / "build.sh", tmp_path / "build"
    script.write_text("cmake -DGGML_NATIVE=ON")
    (folder / "bin").mkdir(parents=True)
    assert not is_built_by(folder, script), "unfinished, or from before recipes were kept"
    (folder / RECIPE).write_text(recipe_of(script))
    assert is_built_by(folder, script)
    script.write_text("cmake -DGGML_NATIVE=OFF")
    assert not is_built_by(folder, script)


def test_native_build_has_the_options_of_the_installation() -> None:
    """With others, its compiler's cache finds nothing of what the installation has compiled."""
    build, script = ENVIRONMENT.variants[Variant.CPU].build, SERVER_SCRIPTS[-1].read_text()
    assert build is not None
    assert [option for option in build.options if option not in script] == []


@pytest.mark.runtimes
@pytest.mark.timeout(3700)
async def test_native_server_has_no_kernels_beyond_the_baseline() -> None:
    backend = LlamaServerBackend(
        *engine_settings(
            LlamaServerModel,
            command=(str(built_llama_server()),),
            path=demo_model_path(),
            name="smollm2",
            context_tokens=512,
            extra_arguments=("--log-verbosity", "4"),
        )
    )
    await backend.start()
    lines = [line for line in backend.log_lines(10_000) if "system_info" in line]
    await backend.stop()
    assert lines, "it says what it was compiled for"
    _require_baseline(lines[0])


@pytest.mark.runtimes
@pytest.mark.timeout(3700)
def test_library_has_no_kernels_beyond_the_baseline() -> None:
    say = "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
    ran = subprocess.run(
        [str(built_llama_cpp_python()), "-c", say],
        env={"LLAMA_CPP_LIB_PATH": str(LLAMA_CPP / "bin")},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    _require_baseline(ran.stdout)


@pytest.mark.parametrize("beyond", ["AMX_INT8", "AVX512", "AVX512_BF16", "AVX_VNNI"])
def test_kernel_beyond_the_baseline_is_detected(beyond: str) -> None:
    told = " | ".join(f"{name} = 1" for name in sorted(BASELINE))
    _require_baseline(f"system_info: n_threads = 2 | CPU : {told} | OPENMP = 1 |")
    with pytest.raises(AssertionError):
        _require_baseline(f"system_info: n_threads = 2 | CPU : {told} | {beyond} = 1 | OPENMP = 1 |")


def _require_baseline(system_info: str) -> None:
    """Fails unless the features that ggml prints are those of the baseline, and none beyond it."""
    features = set(_FEATURE.findall(system_info))
    assert features >= BASELINE
    assert not [feature for feature in features if BEYOND.search(feature)]
