"""CUDA's libraries in the packages of an environment are loaded for the engine."""

import _ctypes
import shutil
import subprocess
import sys
from pathlib import Path

from runner_svc.engine_host.ctranslate2 import cuda_libraries, load_cuda_libraries

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
        "from runner_svc.engine_host.ctranslate2 import load_cuda_libraries\n"
        "print(load_cuda_libraries(Path(sys.argv[1])), sys.argv[2] in Path('/proc/self/maps').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(blas)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 True\n"


def test_environment_without_cuda_libraries_loads_none(tmp_path: Path) -> None:
    assert load_cuda_libraries(tmp_path) == 0
