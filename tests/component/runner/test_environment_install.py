"""An environment is installed from a package index of ours, with real Python and pip, and what fails leaves nothing."""

import asyncio
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.copied_python import write_copied_python
from kit.failures import expect_failure, fails
from kit.gravel_runtime import lock_of, write_wheel
from kit.package_index import Behaviour, PackageIndex, package_index

from runner_svc.environments.environment import (
    EngineEnvironment,
    EnvironmentVariant,
    Interpreter,
    Variant,
    find_interpreter,
)
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import changing, read_receipt, status_of
from runner_svc.environments.installer import EnvironmentInstaller, InstallOrder, InstallProgress, InstallStep
from runner_svc.environments.removal import remove_environment
from weft.api.runner.v1 import environment_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_testing.free_port import free_port

pytestmark = pytest.mark.slow("makes environments with pip")

WAIT_SECONDS = 60.0


class Stage:
    """A home, an index with one wheel, and the environment `gravel` that holds it."""

    def __init__(self, folder: Path, index: PackageIndex, interpreter: Interpreter) -> None:
        self.index = index
        self.interpreter = interpreter
        self.wheel = write_wheel(index.wheels)
        self.locks = folder / "declared" / "gravel"
        self.locks.mkdir(parents=True)
        self.lock_now()
        self.environment = EngineEnvironment(
            folder=self.locks,
            summary="Gravel 1.0",
            variants={
                Variant.CPU: EnvironmentVariant(
                    locks=("cpu.lock",), installed_bytes=1, download_bytes=1, stubs=("grit==2.0+cpu",)
                )
            },
            check="import pebble; from importlib.metadata import version; assert version('grit') == '2.0+cpu'",
            oldest_python=(3, 11),
            newest_python=(3, 14),
        )
        self.folder = EnvironmentFolder(folder / "home" / "runtimes")
        self.progress: list[InstallProgress] = []
        self.log: list[str] = []

    def lock_now(self) -> None:
        (self.locks / "cpu.lock").write_text(lock_of(self.wheel), "utf-8")

    async def install(
        self, environment: EngineEnvironment | None = None, seconds: float = WAIT_SECONDS
    ) -> pb.InstalledEnvironment:
        environment = environment or self.environment
        installer = EnvironmentInstaller(self.folder, SystemClock(), self.progress.append, self.log.append)
        order = InstallOrder(
            environment=environment,
            variant=Variant.CPU,
            interpreter=self.interpreter,
            seconds=seconds,
        )
        return await installer.install(order)

    async def refusal(self, environment: EngineEnvironment | None = None, seconds: float = WAIT_SECONDS) -> WeftError:
        with pytest.raises(WeftError) as refused:
            await self.install(environment, seconds)
        return refused.value

    def state(self) -> str:
        return pb.EnvironmentState.Name(status_of(self.environment, self.folder).state).removeprefix(
            "ENVIRONMENT_STATE_"
        )

    def versions(self) -> list[Path]:
        folder = self.folder.versions(self.environment)
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def says(self) -> str:
        program = self.folder.environment_program(self.environment, "pebble")
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return Interpreter(write_copied_python(tmp_path_factory.mktemp("python")), platform.python_version())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> Iterator[Stage]:
    wheels = tmp_path / "wheels"
    with package_index(wheels) as index:
        for name, value in index.variables().items():
            monkeypatch.setenv(name, value)
        yield Stage(tmp_path, index, interpreter)


async def test_environment_is_built_checked_and_moved_into_place(stage: Stage) -> None:
    stage.interpreter = find_interpreter(stage.environment, None)
    assert stage.state() == "NOT_INSTALLED"
    receipt = await stage.install()
    assert stage.says() == "a pebble\n"
    assert stage.state() == "INSTALLED"
    (version,) = stage.versions()
    assert receipt == read_receipt(version)
    assert receipt.folder == str(version)
    assert receipt.installed_bytes > stage.wheel.stat().st_size
    assert receipt.python_version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    steps = list(dict.fromkeys(each.step for each in stage.progress))
    assert steps == [InstallStep.PYTHON, InstallStep.PACKAGES, InstallStep.CHECK]
    assert {each.total for each in stage.progress if each.step is InstallStep.PACKAGES} == {1}
    assert any("Successfully installed pebble-1.0" in line for line in stage.log)


async def test_newer_lock_files_replace_the_installation(stage: Stage) -> None:
    await stage.install()
    (before,) = stage.versions()
    write_wheel(stage.index.wheels, filling_bytes=100_000)
    stage.lock_now()
    assert stage.state() == "OUTDATED"
    assert stage.says() == "a pebble\n"
    await stage.install()
    (after,) = stage.versions()
    assert after != before
    assert stage.state() == "INSTALLED"


async def test_package_hash_mismatch_is_rejected_and_the_installation_remains(stage: Stage) -> None:
    await stage.install()
    before = stage.versions()
    write_wheel(stage.index.wheels, filling_bytes=100_000)
    refused = await stage.refusal()
    assert "its hash is wrong" in refused.message
    assert "DO NOT MATCH THE HASHES" in refused.message
    assert stage.versions() == before
    assert stage.says() == "a pebble\n"


async def test_broken_connection_is_reported_and_leaves_nothing(stage: Stage) -> None:
    stage.index.behaviour = Behaviour.CUTS
    refused = await stage.refusal()
    # Some versions of pip do not notice it themselves: then it is the hash that differs.
    assert "the connection was lost" in refused.message or "the download was incomplete" in refused.message
    assert stage.versions() == []
    assert stage.state() == "NOT_INSTALLED"


async def test_installation_times_out_and_leaves_nothing(stage: Stage) -> None:
    stage.index.behaviour = Behaviour.DRIPS
    refused = await stage.refusal(seconds=3.0)
    assert refused.reason is Reason.DEADLINE_EXCEEDED
    assert refused.message == "gravel was not installed within 3 s; more time: --timeout"
    assert stage.versions() == []


async def test_cancelled_installation_leaves_nothing_and_the_next_one_works(stage: Stage) -> None:
    stage.index.behaviour = Behaviour.DRIPS
    installing = asyncio.create_task(stage.install())
    assert await asyncio.to_thread(stage.index.dripping.wait, WAIT_SECONDS)
    assert stage.state() == "CHANGING"
    installing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await installing
    assert stage.versions() == []
    stage.index.behaviour = Behaviour.SERVES
    await stage.install()
    assert stage.says() == "a pebble\n"


async def test_packages_that_do_not_work_here_are_not_moved_into_place(stage: Stage) -> None:
    broken = replace(stage.environment, check="raise OSError('CUDA_HOME is not set')")
    refused = await stage.refusal(broken)
    assert refused.message.startswith("gravel was not installed: its packages are installed, but do not work here:")
    assert "OSError: CUDA_HOME is not set" in refused.message
    assert stage.versions() == []


async def test_insufficient_disk_space_is_rejected_before_any_download(stage: Stage) -> None:
    large = EnvironmentVariant(locks=("cpu.lock",), installed_bytes=10**18, download_bytes=1)
    refused = await stage.refusal(replace(stage.environment, variants={Variant.CPU: large}))
    assert refused.reason is Reason.INVALID_ARGUMENT
    assert re.match(
        rf"gravel \(cpu\) needs \d+ GiB on the disk of {stage.folder.root}, and .* are free", refused.message
    )
    assert stage.index.asked == []
    assert stage.versions() == []


async def test_missing_index_is_reported(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    expect_failure(await stage.refusal(), Reason.SERVICE_UNAVAILABLE, "a package index could not be reached")
    assert stage.versions() == []


async def test_concurrent_second_installation_is_rejected(stage: Stage) -> None:
    with changing(stage.environment, stage.folder):
        refused = await stage.refusal()
    assert refused.reason is Reason.ALREADY_EXISTS
    assert refused.message == "another process is installing or removing gravel; wait for it"


async def test_leftovers_of_a_killed_installation_are_removed_by_the_next(stage: Stage) -> None:
    leftover = stage.folder.versions(stage.environment) / "dead.tmp"
    (leftover / "pip-unpack").mkdir(parents=True)
    assert stage.state() == "NOT_INSTALLED"
    await stage.install()
    assert leftover not in stage.versions()
    assert len(stage.versions()) == 1


async def test_foreign_folder_is_left_untouched(stage: Stage) -> None:
    own = stage.folder.link(stage.environment)
    own.mkdir(parents=True)
    assert (await stage.refusal()).message == f"NAME: {own} was not made by weft; move it away"
    with pytest.raises(WeftError, match="was not made by weft"):
        remove_environment(stage.environment, stage.folder)
    assert own.is_dir()


async def test_environment_in_use_is_removed_only_by_force_and_survives_an_upgrade(stage: Stage) -> None:
    await stage.install()
    (used,) = stage.versions()
    python = stage.folder.environment_python(stage.environment)
    engine = await asyncio.create_subprocess_exec(
        python, "-c", "import pebble; print('up', flush=True); input()", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert engine.stdout is not None
        assert await engine.stdout.readline() == b"up\n"
        with fails(Reason.RESOURCE_IN_USE, match=rf"gravel is used by python\S* \(pid {engine.pid}\)"):
            remove_environment(stage.environment, stage.folder)

        await stage.install()
        assert used in stage.versions()
        assert stage.folder.link(stage.environment).resolve() != used
        assert engine.returncode is None
    finally:
        await engine.communicate(b"\n")
    assert remove_environment(stage.environment, stage.folder)
    assert stage.versions() == []
    assert not remove_environment(stage.environment, stage.folder)
    assert stage.state() == "NOT_INSTALLED"


async def test_moved_home_reports_a_broken_environment(stage: Stage, tmp_path: Path) -> None:
    await stage.install()
    (tmp_path / "home").rename(tmp_path / "elsewhere")
    moved = EnvironmentFolder(tmp_path / "elsewhere" / "runtimes")
    status = status_of(stage.environment, moved)
    assert status.state == pb.ENVIRONMENT_STATE_BROKEN
    assert status.detail.startswith(f"it was moved here from {tmp_path}/home/runtimes/.versions/gravel/")
    assert status.detail.endswith("--reinstall")
