"""A simulated installation of the example runtime package, without network and pip."""

import tomllib
from pathlib import Path

from runner_svc.runtimes import table
from weft.extension import installed_extensions

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "runtime_plugin"


def install(folder: Path) -> list[str]:
    """Writes the package's metadata to `folder`, like pip; returns the paths that make it importable."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = {f"weft.extensions:{name}": value for name, value in project["entry-points"]["weft.extensions"].items()}
    write_distribution(folder, project["name"], project["version"], points)
    return [str(EXAMPLE), str(folder)]


def install_runtime(site: Path, package: str, name: str, place: str) -> None:
    """Writes an extension of the given package to `site`, with one runtime."""
    module = package.replace("-", "_") + "_extension"
    (site / f"{module}.py").write_text(
        "from weft.extension import Extension, RuntimeHook\n"
        f"RUNTIMES = (RuntimeHook(name={name!r}, place={place!r}),)\n"
        f"EXTENSION = Extension(name={module!r}, summary='Test.', docs='', runtimes=RUNTIMES)\n",
        "utf-8",
    )
    write_distribution(site, package, "1.0", {f"weft.extensions:{module}": f"{module}:EXTENSION"})


def forget_extensions() -> None:
    """Forgets what was found in the environment."""
    installed_extensions.cache_clear()
    table.installed.cache_clear()


def write_distribution(folder: Path, name: str, version: str, points: dict[str, str]) -> None:
    """Writes the metadata of an installed distribution; `points` are entry points by "group:name"."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{key.partition(':')[0]}]\n{key.partition(':')[2]} = {value}\n" for key, value in points.items()]
    (info / "entry_points.txt").write_text("".join(lines), encoding="utf-8")
