"""Debian packages for tests: installed as root, or unpacked into a folder."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL_SECONDS = 300.0
LOCK_SECONDS = 240
"""Maximum wait for another test's installation."""


def require_installed(*packages: str) -> None:
    """Installs missing packages.

    Skips the test if it cannot install, and fails it if a package is unavailable.
    """
    missing = [package for package in packages if not _is_installed(package)]
    if not missing:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        pytest.skip(f"only root on Debian can install what is missing: apt-get install {' '.join(missing)}")
    apt = ["apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={LOCK_SECONDS}"]
    folder = Path.cwd()
    _run([*apt, "update"], folder)
    # All at once, since the choice between two alternatives may depend on another package.
    _run([*apt, "install", "--yes", "--no-install-recommends", *packages], folder)


def _is_installed(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    words = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout == "installed"


def unpacked(package: str, folder: Path) -> Path:
    """Returns the folder with the package's `usr`; downloads the package if necessary.

    Skips the test if there is no apt-get, and fails it if the package is unavailable.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("packages come from Debian, and here is no apt-get")
    root = folder / package
    if (root / "usr").exists():
        return root
    download = folder / "download"
    (download / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    # With separate package lists: the system's may be missing or only readable by root.
    apt = ["apt-get", "-qq", "-o", f"Dir::State::lists={download / 'lists'}", "-o", f"Dir::Cache={download}"]
    for words in ([*apt, "update"], [*apt, "download", package]):
        _run(words, download)
    (archive,) = download.glob(f"{package}_*.deb")
    made = folder / f"{package}.partial"
    _run(["dpkg-deb", "-x", str(archive), str(made)], download)
    made.rename(root)
    return root


def _run(words: list[str], folder: Path) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
