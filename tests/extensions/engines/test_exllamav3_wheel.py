"""The stand-in for ExLlamaV3 takes the arguments that the library takes: its wheel, unpacked and not imported."""

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from library_signatures import text_of
from record_exllamav3 import RECORD, recorded

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(600)]

DOWNLOAD_SECONDS = 300


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of the recorded version, without what it needs."""
    folder = tmp_path_factory.mktemp("exllamav3")
    version = json.loads(RECORD.read_text(encoding="utf-8"))["version"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, f"exllamav3=={version}"], check=True, timeout=DOWNLOAD_SECONDS)
    (archive,) = folder.glob("*.whl")
    with ZipFile(archive) as opened:
        opened.extractall(folder / "unpacked")
    return folder / "unpacked"


def test_recorded_signatures_match_the_wheel(wheel: Path) -> None:
    assert text_of(recorded(wheel)) == RECORD.read_text(encoding="utf-8")
