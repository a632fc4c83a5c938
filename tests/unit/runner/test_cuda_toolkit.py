"""Which cards CUDA programs are built for, and NVIDIA's packages as a toolkit that CMake finds."""

import ctypes
from pathlib import Path

import pytest

from runner_svc.environments.cuda_toolkit import FOLDER, architecture_options, prepare
from runner_svc.environments.environment import BuildTool
from weft.kernel.errors import FieldError


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
