"""Starts an engine's server program under the interpreter of the engine's environment.

    /path/of/the/engine's/environment/bin/python /path/of/this/bootstrap.py MODULE [FLAGS]

It makes `weft_extensions`, and `runner_svc` for the reading of model files, importable from its own location, but no
other package there: libraries come only from the engine's environment. MODULE is the program, which has a `main`.
"""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = "weft_extensions"


def make_importable(folder: Path) -> None:
    """Registers the package in a folder without adding the folder to the import path."""
    spec = spec_from_file_location(folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None, "the file lies beside this one"
    assert spec.loader is not None, "it is a Python file"
    package = module_from_spec(spec)
    sys.modules[folder.name] = package
    spec.loader.exec_module(package)


def main() -> None:
    """Runs the program that the first argument names."""
    # Python puts a script's folder first on the path, where weft's modules would shadow libraries of the same name.
    own = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != own]
    for name in (PACKAGE, "runner_svc"):
        make_importable(own.parents[2] / name)
    if len(sys.argv) < 2 or not sys.argv[1].startswith(f"{PACKAGE}."):
        sys.exit(f"usage: {sys.argv[0]} {PACKAGE}.MODULE [FLAGS]")
    program = sys.argv.pop(1)
    import_module(program).main()


if __name__ == "__main__":
    main()
