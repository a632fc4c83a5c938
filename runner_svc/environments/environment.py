"""Engine environments: their variants, lock files and self-check, and the interpreter that each is created with.

Most are packages for a Python. One with a `SourceBuild` is a program that is compiled for this machine.

The lock files are in folders next to this file. A runtime's descriptor names its environment; several runtimes may
share one.
"""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from runner_svc.environments.vulkan_devices import has_vulkan_device
from weft.kernel.errors.error_tree import invalid_field

FOLDER = Path(__file__).parent
"""Parent folder of weft's lock files."""
PythonVersion = tuple[int, int]
"""A minor version of Python, such as (3, 11)."""


class Variant(StrEnum):
    """The devices that an environment's packages are built for."""

    CPU = "cpu"
    CUDA = "cuda"
    VULKAN = "vulkan"
    ROCM = "rocm"
    METAL = "metal"


@dataclass(frozen=True, slots=True)
class BuildTool:
    """A program that a build needs."""

    names: tuple[str, ...]
    """Its names on PATH; one is enough."""
    remedy: str
    beside: str = ""
    """File in the parent of its folder, without which it is not used, such as "include/cublas_v2.h"."""
    packages: "ToolPackages | None" = None
    """Packages that replace it if it is missing; None: no package index has it."""

    @property
    def is_found(self) -> bool:
        """Whether this machine has it."""
        found = [Path(path) for path in map(shutil.which, self.names) if path is not None]
        places = {folder for path in found for folder in (path.parent.parent, path.resolve().parent.parent)}
        return any((folder / self.beside).exists() for folder in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPackages:
    """A build tool as packages of an index."""

    lock: str
    """Lock file in the environment's folder."""
    prepare: Callable[[Path, Path], Sequence[str]]
    """Prepares the installed packages, given their folder and that of the program's source, and returns the options of
    CMake that select them. It is called before each configuration."""
    libraries: tuple[str, ...]
    """Libraries that the program needs when it runs, as patterns below the folder of the packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderPackage:
    """A Debian package of header files, which is unpacked for one build and not installed."""

    url: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBuild:
    """A program that CMake builds from a pinned source distribution. The locks of its variant have CMake and Ninja."""

    source: str
    """Lock file of the distribution, in the environment's folder."""
    inside: str
    """Folder of the project in the distribution, such as "vendor/llama.cpp"."""
    options: tuple[str, ...]
    """Options of CMake."""
    tools: tuple[BuildTool, ...]
    headers: tuple[HeaderPackage, ...] = ()
    """Headers that are preferred to the machine's."""
    check: Path
    """Program that runs with the built program and the variant, and fails if that does not work."""
    work_bytes: int
    """Measured size of the source and the build, which are removed after the installation."""

    @property
    def tool_packages(self) -> tuple[ToolPackages, ...]:
        """The packages of the tools that this machine does not have."""
        return tuple(tool.packages for tool in self.tools if tool.packages is not None and not tool.is_found)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariant:
    """The packages of an environment for one kind of device."""

    locks: tuple[str, ...]
    """Lock files in the environment's folder, in installation order. They list all packages: pip adds none."""
    installed_bytes: int
    """Measured size of the installed environment."""
    download_bytes: int
    """Measured size of the packages."""
    stubs: tuple[str, ...] = ()
    """Empty distributions, as "name==version", for programs that look up a package version under another name."""
    build: SourceBuild | None = None
    """Build of its program; None: its packages are all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvironment:
    """A Python environment for engines, separate from weft's so that neither restricts the other's packages."""

    folder: Path
    """Folder of the lock files; its name is the environment's name."""
    summary: str
    variants: Mapping[Variant, EnvironmentVariant]
    check: str = ""
    """Python code that verifies the installation; an exception means that it does not work."""
    program: str = "python"
    """Program in it without which it is broken."""
    oldest_python: PythonVersion = (3, 11)
    newest_python: PythonVersion = (3, 13)
    """Python versions that the lock files have packages for."""
    machine: str = "Linux x86_64"
    """System and processor that the lock files have packages for; empty: any."""

    @property
    def name(self) -> str:
        """The name for `weft runtime install`, and of its folder below the home."""
        return self.folder.name

    def lock_files(self, variant: Variant) -> tuple[Path, ...]:
        """Returns the lock files of an existing variant."""
        return tuple(self.folder / lock for lock in self.variants[variant].locks)

    @property
    def keeps_versions(self) -> bool:
        """Whether other versions are kept beside the one in use: they take long to build and little space."""
        return any(variant.build is not None for variant in self.variants.values())

    def supports_python(self, version: PythonVersion) -> bool:
        """Whether the lock files have packages for this Python version."""
        return self.oldest_python <= version <= self.newest_python


class VariantChoice(StrEnum):
    """The variant that a user requests."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    VULKAN = "vulkan"
    ROCM = "rocm"
    METAL = "metal"


def fitting_variants(
    has_cards: Callable[[], bool], root: Path = Path("/"), has_vulkan: Callable[[], bool] = has_vulkan_device
) -> Iterator[Variant]:
    """Yields the variants for this machine's devices, the fastest first, ending with CPU.

    `has_cards` tells whether NVIDIA's driver reports cards. An AMD card needs ROCm's compiler for its own variant;
    Vulkan serves every other device with a render node, if its driver reports it.
    """
    if has_cards():
        yield Variant.CUDA
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        yield Variant.METAL
    if (root / "dev" / "kfd").exists() and shutil.which("hipcc") is not None:
        yield Variant.ROCM
    if any((root / "dev" / "dri").glob("renderD*")) and has_vulkan():
        yield Variant.VULKAN
    yield Variant.CPU


def choose_variant(environment: EngineEnvironment, choice: VariantChoice, has_cards: Callable[[], bool]) -> Variant:
    """Returns the variant to install: the requested one, or the fastest for this machine's devices.

    `has_cards` is called only for `auto`. Raises INVALID_ARGUMENT if the environment has no such variant.
    """
    if choice is not VariantChoice.AUTO:
        wanted = Variant(choice.value)
        if wanted not in environment.variants:
            known = ", ".join(environment.variants)
            raise invalid_field("--variant", f"{environment.name} has no variant {wanted}, only {known}")
        return wanted
    found = [variant for variant in fitting_variants(has_cards) if variant in environment.variants]
    if found:
        return found[0]
    raise invalid_field(
        "--variant", f"{environment.name} needs an NVIDIA card, and there is none here; --variant cuda installs it"
    )


ASK_SECONDS = 30.0
_ASK = "import platform, sys; print(sys.implementation.name, platform.python_version())"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python on this machine."""

    path: Path
    version: str
    """Such as "3.11.7"."""

    @property
    def minor_version(self) -> PythonVersion:
        """Its major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def find_interpreter(environment: EngineEnvironment, chosen: Path | None) -> Interpreter:
    """Returns the first Python that fits the lock files: the chosen one, weft's, or one on PATH.

    Raises INVALID_ARGUMENT if none fits, or if the lock files are for another machine.
    """
    machine = f"{platform.system()} {platform.machine()}"
    if environment.machine not in ("", machine):
        raise invalid_field("NAME", f"{environment.name} has packages for {environment.machine}, this is {machine}")
    oldest, newest = environment.oldest_python, environment.newest_python
    wanted = f"Python {_text(oldest)} to {_text(newest)}"
    if chosen is not None:
        return _fitting(environment, chosen, wanted)
    if sys.implementation.name == "cpython" and environment.supports_python(sys.version_info[:2]):
        return Interpreter(Path(sys.executable), platform.python_version())
    for minor in range(newest[1], oldest[1] - 1, -1):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        if found is not None:
            return _fitting(environment, Path(found), wanted)
    raise invalid_field(
        "--python", f"{environment.name} needs {wanted}, and weft runs on {platform.python_version()}; choose another"
    )


def _fitting(environment: EngineEnvironment, path: Path, wanted: str) -> Interpreter:
    try:
        asked = subprocess.run(  # noqa: S603 - the user's choice
            [str(path), "-I", "-c", _ASK], capture_output=True, text=True, timeout=ASK_SECONDS, check=True
        )
        implementation, version = asked.stdout.split()
        found = Interpreter(path, version)
        fits = implementation == "cpython" and environment.supports_python(found.minor_version)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise invalid_field("--python", f"{path} is not a working Python: {error}") from error
    if not fits:
        raise invalid_field("--python", f"{environment.name} needs {wanted}, and {path} is {implementation} {version}")
    return found


def _text(version: PythonVersion) -> str:
    return f"{version[0]}.{version[1]}"
