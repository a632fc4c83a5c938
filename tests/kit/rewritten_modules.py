"""Rewrites the assertions of test modules before pytest starts its workers.

    python -m kit.rewritten_modules tests examples/runtime_plugin/tests

In a fresh checkout all workers would otherwise rewrite every module at the same time. Modules that are up to date are
skipped. pytest has no public API for this, but its version is locked, and
`tests/component/kit/test_rewritten_modules.py` verifies that it uses these files.
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
"""Number of modules per task of a process."""


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
    """Returns pytest's settings without the project's, which do not affect assertion rewriting."""
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
