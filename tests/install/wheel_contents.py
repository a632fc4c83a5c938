"""What a wheel holds, compared with the files of the repository."""

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAN_PAGE = "share/man/man1/weft.1"


def _settings() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        targets = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]
    wheel: dict[str, Any] = targets["wheel"]
    return wheel


def wanted_files() -> set[str]:
    """Every file of the packages that git knows, and those that are added under another name."""
    settings = _settings()
    added: dict[str, str] = settings["force-include"]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *settings["packages"], *added],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    found = {MAN_PAGE}
    for name in listed.splitlines():
        if not (ROOT / name).is_file():
            continue
        for source, target in added.items():
            if Path(name).is_relative_to(source):
                found.add(str(Path(target) / Path(name).relative_to(source)))
                break
        else:
            found.add(name)
    return found


def wheel_files(wheel: Path) -> set[str]:
    """The files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = (re.sub(r"^weft-[^/]+\.data/data/", "", name) for name in archive.namelist())
        return {name for name in names if ".dist-info/" not in name}


def differences(wheel: Path) -> set[str]:
    """What a wheel lacks ("- name") or has too much ("+ name")."""
    wanted, found = wanted_files(), wheel_files(wheel)
    return {f"- {name}" for name in wanted - found} | {f"+ {name}" for name in found - wanted}


def without(wheel: Path, prefix: str, target: Path) -> Path:
    """Writes a copy of a wheel without the files whose names begin so, and returns it."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as cut:
        for entry in whole.infolist():
            if not entry.filename.startswith(prefix):
                cut.writestr(entry, whole.read(entry))
    return target
