"""The declaration of an engine's environment: its variants, their lock files, and what proves that it works.

The lock files of weft's own are in folders beside this file. A runtime's descriptor names its environment; several may
share one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from weft.kernel.errors import invalid_field

FOLDER = Path(__file__).parent
"""Where the folders of weft's own environments are."""
PythonVersion = tuple[int, int]
"""A minor version of Python, such as (3, 11)."""


class Variant(StrEnum):
    """For which devices the packages of an environment are built."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVariant:
    """The packages of an environment for one sort of device."""

    locks: tuple[str, ...]
    """Lock files in the environment's folder, installed in this order. They hold every package: dependencies that no
    lock names are left out."""
    installed_bytes: int
    """Measured size of the installed environment."""
    download_bytes: int
    """Measured size of the packages."""
    stubs: tuple[str, ...] = ()
    """Distributions without content, as "name==version": for programs that ask for the version of a package under a
    name by which it was not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvironment:
    """A Python environment that engines run in, apart from weft's own: its packages never decide those of weft."""

    folder: Path
    """Folder of the lock files; its name is the environment's."""
    summary: str
    """Description in one line."""
    variants: Mapping[Variant, EnvironmentVariant]
    check: str
    """Python code that its interpreter runs after the installation; an exception means that it does not work."""
    oldest_python: PythonVersion = (3, 11)
    newest_python: PythonVersion = (3, 13)
    """The versions of Python that the locks have packages for."""
    machine: str = "Linux x86_64"
    """The system and processor that the locks have packages for."""

    @property
    def name(self) -> str:
        """The name of `weft runtime install`, and of its folder under the home."""
        return self.folder.name

    def lock_files(self, variant: Variant) -> tuple[Path, ...]:
        """Returns the lock files of a variant that it has."""
        return tuple(self.folder / lock for lock in self.variants[variant].locks)

    def supports_python(self, version: PythonVersion) -> bool:
        """Whether the locks have packages for this version."""
        return self.oldest_python <= version <= self.newest_python


class VariantChoice(StrEnum):
    """The variant that a user asks for."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def choose_variant(environment: EngineEnvironment, choice: VariantChoice, has_cards: Callable[[], bool]) -> Variant:
    """Returns the variant to install: the one asked for, else the one for the cards of this machine.

    `has_cards` is asked for `auto` alone. Raises INVALID_ARGUMENT where the environment has no such variant.
    """
    if choice is not VariantChoice.AUTO:
        wanted = Variant(choice.value)
        if wanted not in environment.variants:
            known = ", ".join(environment.variants)
            raise invalid_field("--variant", f"{environment.name} has no variant {wanted}, only {known}")
        return wanted
    if Variant.CUDA not in environment.variants:
        return Variant.CPU
    if has_cards():
        return Variant.CUDA
    if Variant.CPU in environment.variants:
        return Variant.CPU
    raise invalid_field(
        "--variant", f"{environment.name} needs an NVIDIA card, and there is none here; --variant cuda installs it"
    )
