"""What the wheel and the images contain, and under which licenses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.install
_LOCKED = re.compile(r"^([a-z0-9.-]+)==(\S+)((?:.*\\\n)*.*)", re.MULTILINE)


def _made(*arguments: str) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, str(ROOT / ".ci" / "sbom.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def _document(built: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "dist" / f"weft-{built}.cdx.json").read_text())
    return found


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    """What is listed, by what is built."""
    made = _made()
    assert made.returncode == 0, made.stderr
    return {built: _document(built) for built in ("wheel", "images")}


@pytest.mark.parametrize(("built", "locks"), [("wheel", ["up.lock"]), ("images", ["up.lock", "postgres.lock"])])
def test_every_locked_package_is_listed_with_hashes_and_an_allowed_license(
    documents: dict[str, dict[str, Any]], built: str, locks: list[str]
) -> None:
    document = documents[built]
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "weft"
    listed = {(each["name"], each["version"]): each for each in document["components"]}
    text = "".join((ROOT / "requirements" / lock).read_text() for lock in locks)
    locked = {
        (name, version): set(re.findall("sha256:([0-9a-f]{64})", rest)) for name, version, rest in _LOCKED.findall(text)
    }
    assert listed.keys() == locked.keys()
    for key, component in listed.items():
        assert component["licenses"], key
        hashes = [reference.get("hashes", ()) for reference in component["externalReferences"]]
        assert {each["content"] for some in hashes for each in some} & locked[key], key


def test_documents_are_the_same_each_time(documents: dict[str, dict[str, Any]]) -> None:
    assert _made().returncode == 0
    assert {built: _document(built) for built in documents} == documents


def test_package_with_an_unlisted_license_is_refused_by_name() -> None:
    """The control."""
    made = _made("--allow", "MIT", "Apache-2.0")
    assert made.returncode == 1
    assert "psycopg: the license is LGPL-3.0-only, which .ci/sbom.py does not list" in made.stderr
    assert "pydantic:" not in made.stderr
