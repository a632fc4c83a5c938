"""The start of an engine's server program under the interpreter of the engine's own environment.

    /path/of/the/engine's/environment/bin/python /path/of/weft/runner_svc/engine_host/bootstrap.py MODULE [FLAGS]

It makes the package `runner_svc` importable from where this file lies, and nothing else that is installed there: the
libraries are those of the engine's environment alone. MODULE is the engine's program, which has a `main`.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = "runner_svc"


def make_importable(folder: Path) -> None:
    """Register the package in this folder, whose modules are then found there and nowhere else."""
    spec = spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None, "the file lies beside this one"
    assert spec.loader is not None, "it is a Python file"
    package = module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Run the program that the first argument names."""
    # Python puts the folder of a script first, where our modules would hide libraries of the same name.
    own = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != own]
    make_importable(own.parent)
    if len(sys.argv) < 2 or not sys.argv[1].startswith(f"{PACKAGE}."):
        sys.exit(f"usage: {sys.argv[0]} {PACKAGE}.MODULE [FLAGS]")
    program = sys.argv.pop(1)
    import_module(program).main()


if __name__ == "__main__":
    main()
