"""Which llama.cpp server is started."""

import sys
from pathlib import Path

import pytest

from runner_svc.environments.environment import Variant, fitting_variants
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import variant_number, write_receipt
from runner_svc.environments.program_build import require_tools
from runner_svc.runtimes.llama_server.engine_report import engine_report
from runner_svc.runtimes.llama_server.runtime import ENVIRONMENT, LAUNCHER, llama_command
from weft.api.runner.v1.environment_pb2 import InstalledEnvironment
from weft.kernel.errors.error_tree import WeftError


@pytest.fixture
def search_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def _install_native(folder: Path) -> Path:
    binary = folder / "llama-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    return binary


def test_native_server_on_the_path_is_preferred(search_path: Path) -> None:
    binary = _install_native(search_path)
    assert llama_command(None) == (str(binary),)


def test_configured_server_takes_precedence_over_both(search_path: Path) -> None:
    _install_native(search_path)
    assert llama_command(("/opt/llama-server", "--flash-attn")) == ("/opt/llama-server", "--flash-attn")


def test_wheel_server_is_used_without_a_native_one(search_path: Path) -> None:
    assert not list(search_path.iterdir())
    assert llama_command(None) == (sys.executable, "-m", LAUNCHER)


def _install_built(folder: EnvironmentFolder, variant: Variant = Variant.CPU) -> Path:
    version = folder.versions(ENVIRONMENT) / variant.value
    (version / "bin").mkdir(parents=True)
    write_receipt(version, InstalledEnvironment(variant=variant_number(variant)))
    folder.point(ENVIRONMENT, version)
    return _install_native(version / "bin")


def test_built_server_is_preferred_to_the_path(search_path: Path, tmp_path: Path) -> None:
    folder = EnvironmentFolder(tmp_path / "runtimes")
    _install_native(search_path)
    built = _install_built(folder)
    assert llama_command(None, folder) == (str(built.resolve()),)


def test_report_names_the_engine_and_advises_a_faster_one(search_path: Path, tmp_path: Path) -> None:
    folder = EnvironmentFolder(tmp_path / "runtimes")
    gpu, none = (Variant.VULKAN, Variant.CPU), (Variant.CPU,)
    text, advice = engine_report(None, folder, gpu)
    assert text.startswith("llama.cpp of xllamacpp ")
    assert advice.startswith("this machine has a device for vulkan; weft runtime install llama_server")
    assert engine_report(None, folder, none) == (text, "")
    # Apple's wheel already uses Metal.
    assert engine_report(None, folder, [Variant.METAL, Variant.CPU]) == (text, "")
    assert engine_report(("/opt/x",), folder, gpu) == ("/opt/x, as configured", "")
    native = _install_native(search_path)
    assert engine_report(None, folder, gpu) == (f"{native}, found on PATH", "")
    _install_built(folder, Variant.VULKAN)
    assert engine_report(None, folder, gpu) == ("llama.cpp for vulkan, of weft runtime install", "")
    _install_built(folder, Variant.CPU)
    assert engine_report(None, folder, gpu) == ("llama.cpp for cpu, of weft runtime install", "")


@pytest.mark.parametrize(
    ("has_cards", "nodes", "has_vulkan", "first"),
    [
        (True, (), False, Variant.CUDA),
        (False, ("renderD128",), True, Variant.VULKAN),
        (False, ("renderD128",), False, Variant.CPU),
        (False, ("card0",), True, Variant.CPU),
    ],
)
def test_fastest_variant_follows_the_devices(
    tmp_path: Path, has_cards: bool, nodes: tuple[str, ...], has_vulkan: bool, first: Variant
) -> None:
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    for node in nodes:
        (tmp_path / "dev" / "dri" / node).touch()
    found = list(fitting_variants(lambda: has_cards, tmp_path, lambda: has_vulkan))
    assert (found[0], found[-1]) == (first, Variant.CPU)


@pytest.mark.parametrize(
    ("variant", "options", "missing"),
    [
        (Variant.VULKAN, {"-DGGML_VULKAN=ON"}, "glslc (on Debian and Ubuntu: sudo apt install glslc libvulkan-dev)"),
        (Variant.ROCM, {"-DGGML_HIP=ON"}, "hipcc (AMD's ROCm, with its folder bin on PATH)"),
        (Variant.METAL, {"-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"}, "c++ or g++ or clang++"),
    ],
)
@pytest.mark.usefixtures("search_path")
def test_build_for_a_device_enables_it_and_names_the_missing_compiler(
    variant: Variant, options: set[str], missing: str
) -> None:
    build = ENVIRONMENT.variants[variant].build
    assert build is not None
    assert options <= set(build.options)
    with pytest.raises(WeftError) as refused:
        require_tools(ENVIRONMENT, variant, build)
    assert missing in refused.value.message
