"""A test that fails is reported as failed, whatever the garbage collector finds meanwhile."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly("checks the tests' own tools")

ROOT = Path(__file__).parents[3]
MANY_LINES = 20_000
"""Enough statements that the collector's first run comes while they are parsed."""
_FAILS_WITH_A_LOST_TASK = """\
import asyncio
import gc


async def dies():
    raise ValueError("lost")


async def leave_a_task_whose_exception_nothing_takes():
    task = asyncio.create_task(dies())
    await asyncio.wait({task})
    cycle = [task]
    cycle.append(cycle)


async def test_of_an_engine_that_died():
    gc.collect()
    await leave_a_task_whose_exception_nothing_takes()
    gc.set_threshold(10_000)
    assert not "this test fails"
"""
_AN_ENGINE_THAT_DIES = """\
from pathlib import Path

from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel
from runner_svc.runtimes.model_engine import ModelContext
from weft_testing.conformance.backend import BackendConformance
from weft_testing.fake_backend.process import fake_backend_command


class TestAnEngineThatDies(BackendConformance):
    def make_variant(self):
        return Path(__file__)

    def make_backend(self, engine):
        command = fake_backend_command(crash_after_tokens=0, crash_signal="SIGSEGV")
        model = LlamaServerModel(name="fake", path=Path(__file__))
        return LlamaServerBackend(model, ModelContext(where="model", command=tuple(command)))
"""


def _pytest(folder: Path, source: str, *arguments: str, plugin: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a file with this source, with our settings."""
    (folder / "test_it.py").write_text(source)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:cacheprovider", *arguments]
    without = [] if plugin else ["-o", "addopts="]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *without, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_failed_test_is_reported_even_if_a_lost_task_is_collected_during_it(tmp_path: Path) -> None:
    ran = _pytest(tmp_path, _FAILS_WITH_A_LOST_TASK + "x = 1\n" * MANY_LINES)
    assert "INTERNALERROR" not in ran.stdout
    assert "1 failed" in ran.stdout
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED


@pytest.mark.skipif(sys.version_info >= (3, 11, 8), reason="repaired in CPython 3.11.8")
def test_pytest_crashes_without_the_plugin(tmp_path: Path) -> None:
    """The control: what the plugin is against does happen."""
    ran = _pytest(tmp_path, _FAILS_WITH_A_LOST_TASK + "x = 1\n" * MANY_LINES, plugin=False)
    assert "AST constructor recursion depth mismatch" in ran.stdout
    assert ran.returncode == pytest.ExitCode.INTERNAL_ERROR


def test_engine_killed_by_a_signal_fails_its_suite_without_lost_tasks(tmp_path: Path) -> None:
    chosen = ("-k", "first_content or cancelled_reader or tokens_are_reported", "-W", "error")
    ran = _pytest(tmp_path, _AN_ENGINE_THAT_DIES, *chosen, plugin=False)
    assert "3 failed" in ran.stdout
    assert ran.stdout.count("SERVER_DIED") >= 3, "each says what ended it"
    assert "never retrieved" not in ran.stdout + ran.stderr
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
