"""Which cards CUDA programs are built for, and NVIDIA's packages as a toolkit; Vulkan devices."""

import _ctypes
import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runner_svc.environments import vulkan_devices
from runner_svc.environments.cuda_toolkit import FOLDER, architecture_options, prepare
from runner_svc.environments.environment import BuildTool
from weft.kernel.errors.error_tree import FieldError
from weft_extensions.engines.engine_host.ctranslate2 import cuda_libraries, load_cuda_libraries


@pytest.mark.parametrize(
    ("named", "cards", "built_for"),
    [
        (None, ("8.6",), "86"),
        (None, ("8.6", "12.0"), "120;86"),
        ("9.0", ("8.6",), "90"),
        ("8.6, 9.0,8.6", (), "86;90"),
    ],
)
def test_architectures_are_those_of_the_cards_unless_stated(
    named: str | None, cards: tuple[str, ...], built_for: str
) -> None:
    assert architecture_options(named, lambda: cards) == (f"-DCMAKE_CUDA_ARCHITECTURES={built_for}",)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, r"there is no NVIDIA card here; .* such as --cuda-architectures 8\.6"),
        ("86", r"written like 8\.6 or 8\.6,9\.0, not 86"),
        ("", "written like"),
        ("8.6;rm", "written like"),
    ],
)
def test_missing_or_malformed_architecture_names_the_option(named: str | None, message: str) -> None:
    with pytest.raises(FieldError, match=message) as refused:
        architecture_options(named, tuple)
    assert refused.value.message.startswith("--cuda-architectures: ")


@pytest.mark.slow("compiles a library")
def test_packages_get_names_for_linking_and_a_stub_of_the_driver(tmp_path: Path) -> None:
    libraries, source = tmp_path / FOLDER / "lib", tmp_path / "source"
    libraries.mkdir(parents=True)
    source.mkdir()
    (libraries / "libcublas.so.13").touch()
    (source / "pool.cu").write_text("cudaMalloc(&p, n); CU_CHECK(cuMemCreate(&handle)); cublasCreate(&c);")
    for _ in range(2):
        options = prepare(tmp_path, source)
    assert options[0] == f"-DCMAKE_CUDA_COMPILER={tmp_path / FOLDER / 'bin' / 'nvcc'}"
    assert (libraries / "libcublas.so").resolve() == libraries / "libcublas.so.13"
    assert (tmp_path / FOLDER / "lib64" / "libcublas.so").exists()
    stub = ctypes.CDLL(str(libraries / "stubs" / "libcuda.so"))
    assert stub.cuMemCreate() == 999
    assert not hasattr(stub, "cudaMalloc")


def test_toolkit_without_its_libraries_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = BuildTool(("nvcc",), "", beside="include/cublas_v2.h")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert not tool.is_found
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    assert not tool.is_found
    assert BuildTool(("nvcc",), "").is_found
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cublas_v2.h").touch()
    assert tool.is_found


PACKAGES = Path("lib") / "python3.11" / "site-packages" / "nvidia"


def _place(prefix: Path, package: str, name: str) -> Path:
    """Puts a real shared library where a package of NVIDIA has its own."""
    path = prefix / PACKAGES / package / "lib" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(_ctypes.__file__, path)
    return path


def test_libraries_of_all_packages_are_found(tmp_path: Path) -> None:
    blas = _place(tmp_path, "cublas", "libcublas.so.12")
    compiler = _place(tmp_path, "cuda_nvrtc", "libnvrtc.so.12")
    (blas.parent / "cublas.txt").touch()
    assert cuda_libraries(tmp_path) == [blas, compiler]
    assert cuda_libraries(tmp_path / "elsewhere") == []


def test_libraries_are_loaded_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    blas = _place(tmp_path, "cublas", "libcublas.so.12")
    (blas.parent / "libdamaged.so.12").write_bytes(b"no library")
    program = (
        "import sys; from pathlib import Path\n"
        "from weft_extensions.engines.engine_host.ctranslate2 import load_cuda_libraries\n"
        "print(load_cuda_libraries(Path(sys.argv[1])), sys.argv[2] in Path('/proc/self/maps').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(blas)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 True\n"


def test_environment_without_cuda_libraries_loads_none(tmp_path: Path) -> None:
    assert load_cuda_libraries(tmp_path) == 0


LIBRARY = """
#include <stdint.h>
static uint32_t types[] = {%(types)s 0};
int vkCreateInstance(void *info, void *none, void **instance) { *instance = types; return %(fault)s; }
int vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **devices) {
    uint32_t number = sizeof(types) / sizeof(*types) - 1;
    *count = number;
    for (uint32_t i = 0; i < number; i++) devices[i] = &types[i];
    return instance == types ? 0 : -1;
}
void vkGetPhysicalDeviceProperties(void *device, uint32_t *properties) { properties[4] = *(uint32_t *)device; }
"""


@pytest.mark.slow("compiles a library")
@pytest.mark.parametrize(
    ("types", "fault", "expected"),
    [("4,", 0, 1), ("4, 2,", 0, 0), ("1,", 0, 0), ("3,", 0, 1), ("", 0, 1), ("2,", -9, 1)],
    ids=["software", "software and card", "integrated", "virtual", "no device", "no driver"],
)
def test_only_integrated_and_discrete_gpus_count(types: str, fault: int, expected: int, tmp_path: Path) -> None:
    source, library = tmp_path / "vulkan.c", tmp_path / "libvulkan.so.1"
    source.write_text(LIBRARY % {"types": types, "fault": fault})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    asked = subprocess.run(
        [sys.executable, "-I", vulkan_devices.__file__],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert asked.returncode == expected, asked.stderr


def test_driver_that_hangs_is_not_used() -> None:
    assert not vulkan_devices.has_vulkan_device(seconds=0.0)
