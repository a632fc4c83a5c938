"""The test modules as pytest runs them, with their assertions rewritten: made before pytest starts its workers.

    python -m kit.rewritten_modules tests examples/runtime_plugin/tests

In a fresh checkout each worker would otherwise rewrite every module for itself, all of them at the same time. A module
that was rewritten before is left alone. pytest has no public name for this part of it; its version is locked, and
`tests/component/kit/test_rewritten_modules.py` shows that it takes the files made here.
"""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir
from _pytest.config import get_config

PATTERNS = ("test_*.py", "conftest.py")
CHUNK = 8
"""Modules that one process is given at a time."""


def modules_in(folders: Iterable[Path]) -> Iterator[Path]:
    """Yields the modules that pytest rewrites."""
    return (module for folder in folders for pattern in PATTERNS for module in sorted(folder.rglob(pattern)))


def rewrite(module: Path) -> bool:
    """Rewrites a module unless its file is up to date; returns whether it did."""
    target = get_cache_dir(module) / f"{module.stem}{PYC_TAIL}"
    if _read_pyc(module, target) is not None:
        return False
    source_hash, code = _rewrite_test(module, _config())
    target.parent.mkdir(exist_ok=True)
    written = target.with_suffix(".new")
    with written.open("wb") as file:
        _write_pyc_fp(file, source_hash, code)
    written.replace(target)
    return True


@cache
def _config() -> pytest.Config:
    """The settings of pytest without those of the project: none of ours changes how assertions are rewritten."""
    config = get_config()
    config.parse(["-p", "no:cacheprovider", "-c", "/dev/null"])
    return config


def main(*folders: str) -> int:
    """Rewrites the modules in these folders on all processors."""
    with ProcessPoolExecutor() as processes:
        done = sum(processes.map(rewrite, modules_in(Path(folder).resolve() for folder in folders), chunksize=CHUNK))
    sys.stdout.write(f"{done} test modules rewritten\n" if done else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
