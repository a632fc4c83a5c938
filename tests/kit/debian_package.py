"""Programs of Debian packages, unpacked into a folder: nothing is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL_SECONDS = 300.0


def unpacked(package: str, folder: Path) -> Path:
    """Returns the folder that holds the package's `usr`; it is downloaded where it is not there yet.

    Skips the test where there is no apt-get; fails it where the package cannot be had.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("packages come from Debian, and here is no apt-get")
    root = folder / package
    if (root / "usr").exists():
        return root
    download = folder / "download"
    (download / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    # With lists of its own: those of the system may be absent, and root's.
    apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={download / 'lists'}", "-o", f"Dir::Cache={download}"]
    for words in ([*apt, "update"], [*apt, "download", package]):
        _run(words, download)
    (archive,) = download.glob(f"{package}_*.deb")
    made = folder / f"{package}.partial"
    _run(["dpkg-deb", "-x", str(archive), str(made)], download)
    made.rename(root)
    return root


def _run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
