"""Packages of libraries without what their `__init__` imports, so that a process loads the parts that it uses.

`import package.part` runs the `__init__` of the package first, which may import every other part of it, and libraries
that only those need. A package that was placed bare has not run it: its modules can be imported one by one. A name of
the package itself, which a library or a test may ask for, still makes `__init__` run.

Each package is placed by one module, from which all of weft takes its names; ruff refuses other imports (`banned-api`).
"""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType

from typing_extensions import override


class _BarePackage(ModuleType):
    """A package whose `__init__` has not run."""

    @override
    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        # The import system asks for a module as an attribute before it looks for its file.
        if spec is None or spec.loader is None or name.startswith("__") or find_spec(f"{spec.name}.{name}") is not None:
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.exec_module(self)
        return getattr(self, name)


def place_bare(package: str) -> None:
    """Makes the modules of a package importable without its `__init__`; nothing, where that has run before."""
    spec = find_spec(package)
    if package in sys.modules or spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = _BarePackage
    sys.modules[package] = module
    parent, _, child = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
