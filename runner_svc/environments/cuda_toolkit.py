"""NVIDIA's compiler from packages of an index, and the cards that it compiles for."""

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

FOLDER = "nvidia/cu13"
"""The toolkit's folder below the packages."""
OPTION = "--cuda-architectures"
MAX_ARCHITECTURES = 16
_CAPABILITY = re.compile(r"[1-9]\d?\.\d")
_DRIVER_CALL = re.compile(r"\b(cu[A-Z]\w+)\s*\(")
_STUB = 'extern "C" int {name}() {{ return 999; }}\n'
"""999 is CUDA_ERROR_UNKNOWN."""


def architecture_options(named: str | None, capabilities: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """Returns the options of CMake for the compute capabilities of a list such as "8.6,9.0", or of the cards here.

    Raises INVALID_ARGUMENT for another list, and if there is neither a list nor a card.
    """
    found = sorted(set(capabilities() if named is None else named.replace(" ", "").split(",")))
    if not found:
        raise invalid_field(
            OPTION, f"there is no NVIDIA card here; state the compute capability to build for, such as {OPTION} 8.6"
        )
    if len(found) > MAX_ARCHITECTURES or not all(map(_CAPABILITY.fullmatch, found)):
        raise invalid_field(OPTION, f"compute capabilities are written like 8.6 or 8.6,9.0, not {named or found}")
    return (f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(each.replace('.', '') for each in found)}",)


def prepare(packages: Path, source: Path) -> tuple[str, ...]:
    """Completes the toolkit in `packages` for building `source`, and returns the options of CMake that select it.

    Packages have no names for linking, and no stub of the driver's library, which only machines with a card have.
    Raises BACKEND_ERROR if the C++ compiler fails.
    """
    toolkit = packages / FOLDER
    libraries = toolkit / "lib"
    _link(toolkit / "lib64", libraries.name)
    for library in libraries.glob("*.so.*"):
        _link(libraries / f"{library.name.partition('.so.')[0]}.so", library.name)
    texts = [path.read_text("utf-8", "replace") for path in sorted(source.rglob("*.cu*")) if path.is_file()]
    names = sorted({name for text in texts for name in _DRIVER_CALL.findall(text)})
    stub = libraries / "stubs" / "libcuda.so"
    stub.parent.mkdir(exist_ok=True)
    made = subprocess.run(  # noqa: S603 - the compiler that the build uses, too
        ["c++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c++", "-", "-o", str(stub)],  # noqa: S607
        input="".join(_STUB.format(name=name) for name in names),
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise WeftError(Reason.BACKEND_ERROR, f"the C++ compiler fails:\n{made.stderr.rstrip()}")
    # The program is moved beside a copy of the libraries.
    place = ("-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN/../lib")
    return f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin' / 'nvcc'}", *place


def _link(link: Path, target: str) -> None:
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(target)
