"""Writes what the wheel and the images contain into dist/ (CycloneDX), and checks the licenses of these packages.

python .ci/sbom.py [--allow LICENSE ...]

Versions and hashes are those of the lock files, licenses those of the packages in .venv. Exit code 1: a package has no
known license, or one that is not in LICENSES.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[1]
TOOL = ROOT / ".venv-dist" / "bin" / "cyclonedx-py"
LOCKS: Mapping[str, tuple[str, ...]] = MappingProxyType({"wheel": ("up.lock",), "images": ("up.lock", "postgres.lock")})
"""Lock files by what is built from them. The images' system packages are those of their base image."""
LICENSES = frozenset(
    {
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "LGPL-2.1-or-later",
        "LGPL-3.0-only",
        "MIT",
        "MIT-0",
        "MPL-2.0",
        "PSF-2.0",
    }
)
"""What weft's dependencies may have: none of them extends to programs that import the package unchanged."""
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "3-Clause BSD License": "BSD-3-Clause",
        "Apache 2.0": "Apache-2.0",
        "Apache Software License": "Apache-2.0",
        "BSD": "BSD-3-Clause",
        "BSD License": "BSD-3-Clause",
        "ISC License": "ISC",
        "MIT License": "MIT",
        "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    }
)
OTHER_SYSTEMS: Mapping[str, str] = MappingProxyType(
    {"colorama": "BSD-3-Clause", "httpx2-jsfetch": "BSD-3-Clause", "pywin32": "PSF-2.0", "tzdata": "Apache-2.0"}
)
"""Licenses of packages that are locked for other systems than Linux, as their metadata on PyPI states them."""


def license_of(package: str) -> str:
    """Returns the SPDX expression of an installed package's license; empty: unknown."""
    try:
        found = metadata(package)
    except PackageNotFoundError:
        return OTHER_SYSTEMS.get(package, "")
    stated = found.get("License-Expression") or (found.get("License") or "").strip()
    if not stated or "\n" in stated:
        named = [each for each in found.get_all("Classifier") or () if each.startswith("License ::")]
        stated = named[0].rpartition(" :: ")[2] if named else ""
    return SPELLINGS.get(stated, stated)


def is_allowed(expression: str, allowed: Collection[str]) -> bool:
    """Whether all licenses of an expression are allowed, or one of its alternatives."""
    alternatives = re.split(r"\s+OR\s+", expression)
    return any(all(part in allowed for part in re.split(r"\s+AND\s+", one)) for one in alternatives)


def contents(locks: tuple[str, ...]) -> dict[str, Any]:
    """Returns the document of what some lock files install, with licenses, the same for the same files."""
    locked = "\n".join((ROOT / "requirements" / name).read_text("utf-8") for name in locks)
    command = [TOOL, "requirements", "-", "--pyproject", "pyproject.toml", "--output-reproducible", "--of", "JSON"]
    made = subprocess.run(command, cwd=ROOT, input=locked, check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(made.stdout)
    by_reference = {each["purl"]: each for each in document["components"]}
    for each in by_reference.values():
        if expression := license_of(each["name"]):
            each["licenses"] = [{"expression": expression}]
    return document | {"components": list(by_reference.values())}


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--allow", nargs="+", default=LICENSES, help="instead of LICENSES")
    allowed = options.parse_args().allow
    refused: dict[str, str] = {}
    (ROOT / "dist").mkdir(exist_ok=True)
    for built, locks in LOCKS.items():
        document = contents(locks)
        path = ROOT / "dist" / f"weft-{built}.cdx.json"
        path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        sys.stdout.write(f"{path.relative_to(ROOT)}: {len(document['components'])} packages\n")
        for each in document["components"]:
            expression = license_of(each["name"])
            if not is_allowed(expression, allowed):
                refused[each["name"]] = expression
    for name, expression in sorted(refused.items()):
        sys.stderr.write(f"{name}: the license is {expression or 'unknown'}, which .ci/sbom.py does not list\n")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
