"""Installation of an environment: built in a new folder, checked, and switched to atomically.

A failed or cancelled installation removes its files, except an unfinished build, which the next one continues.
Leftovers of a killed one are never used, and the next installation removes them.
"""

import asyncio
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event
from uuid import uuid4

from runner_svc.environments.environment import (
    EngineEnvironment,
    EnvironmentVariant,
    Interpreter,
    SourceBuild,
    Variant,
)
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import (
    changing,
    lock_digest,
    read_receipt,
    variant_number,
    versions_of,
    write_receipt,
)
from runner_svc.environments.locked_install import Failure, PipOutput, package_count, pip_arguments
from runner_svc.environments.prebuilt import DIGEST_PREFIX, PrebuiltProgram, download, unpack_program
from runner_svc.environments.program_build import build_program, package_folder, require_tools
from runner_svc.environments.removal import remove_versions
from runner_svc.supervise.child_program import run_program
from weft import __version__
from weft.api.runner.v1 import environment_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.machine_limits import usable_processors
from weft.kernel.services.service_lifecycle import stop_tasks
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.units import size_words

DEFAULT_SECONDS = 7200.0
"""Maximum duration; on a slow line the packages of an engine take an hour."""
PROGRESS_SECONDS = 1.0
"""Interval between measurements of the downloaded size."""
MAX_CHECK_LINES = 20
MAX_SAID_CHARS = 500
VERSION_CHARS = 8
KEPT_PER_VARIANT = 2
PIP_OPTIONS = ("--no-deps", "--no-user", "--no-compile", "--only-binary", ":all:")
"""Only packages in the lock files, and no builds from source; modules are compiled when imported."""
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
_REASONS = {Failure.NETWORK: Reason.SERVICE_UNAVAILABLE, Failure.DISK_FULL: Reason.INVALID_ARGUMENT}
_FAILED = Reason.BACKEND_ERROR


class InstallStep(StrEnum):
    """A step of an installation."""

    PYTHON = "python"
    PACKAGES = "packages"
    SOURCE = "source"
    BUILD = "build"
    CHECK = "check"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallProgress:
    """Progress of an installation."""

    step: InstallStep
    detail: str
    done: int = 0
    total: int = 1
    """Number of parts in this step, such as packages."""
    ended: bool = False
    """Whether the step has succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOrder:
    """What to install, and how."""

    environment: EngineEnvironment
    variant: Variant
    interpreter: Interpreter
    seconds: float = DEFAULT_SECONDS
    jobs: int = field(default_factory=usable_processors)
    """Number of compilers that run concurrently, if a program is built."""
    options: tuple[str, ...] = ()
    """Further options of CMake, such as the architectures of cards."""
    prebuilt: PrebuiltProgram | None = None
    """A program to install instead of building it."""

    @property
    def declared(self) -> EnvironmentVariant:
        """The declaration of the variant."""
        return self.environment.variants[self.variant]

    @property
    def build(self) -> SourceBuild | None:
        """How its program is built; None: it is not."""
        return None if self.prebuilt is not None else self.declared.build

    @property
    def lock_files(self) -> tuple[Path, ...]:
        """All lock files to install: those of the variant, and of build tools that are missing here."""
        folder = self.environment.folder
        tools = () if self.build is None else self.build.tool_packages
        return (*self.environment.lock_files(self.variant), *(folder / each.lock for each in tools))

    @property
    def digest(self) -> str:
        """The digest of what is installed, for the receipt."""
        return lock_digest(self.environment, self.variant) if self.prebuilt is None else self.prebuilt.digest


def needed_bytes(order: InstallOrder) -> int:
    """Returns the free space that an installation needs; pip's cache keeps a copy of each download."""
    work_bytes = 0 if order.build is None else order.build.work_bytes
    return order.declared.installed_bytes + work_bytes + 2 * order.declared.download_bytes


class EnvironmentInstaller:
    """Installs the environments of one home."""

    def __init__(
        self,
        folder: EnvironmentFolder,
        clock: Clock,
        show: Callable[[InstallProgress], None],
        log: Callable[[str], object],
    ) -> None:
        """`log` receives the output of the programs."""
        self._folder = folder
        self._clock = clock
        self._show = show
        self._log = log

    async def install(self, order: InstallOrder) -> pb.InstalledEnvironment:
        """Installs or replaces an environment and returns its receipt.

        Raises ALREADY_EXISTS if another process is changing it, INVALID_ARGUMENT if the disk is too small, and
        DEADLINE_EXCEEDED, SERVICE_UNAVAILABLE or BACKEND_ERROR if the installation fails; then nothing has changed.
        """
        environment = order.environment
        link = self._folder.link(environment)
        with changing(environment, self._folder):
            remove_versions(
                environment, self._folder, keep=self._kept(order, link.resolve() if link.exists() else None)
            )
            if order.build is not None:
                require_tools(environment, order.variant, order.build)
            self._require_space(order)
            target = self._new_version(environment)
            temporary = target.with_suffix(".tmp")
            installed = False
            try:
                temporary.mkdir()
                async with asyncio.timeout(order.seconds):
                    receipt = await self._build(order, target, temporary)
                self._folder.point(environment, target)
                installed = True
            except TimeoutError:
                raise WeftError(
                    Reason.DEADLINE_EXCEEDED,
                    f"{environment.name} was not installed within {order.seconds:.0f} s; more time: --timeout",
                ) from None
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
                if not installed:
                    shutil.rmtree(target, ignore_errors=True)
            remove_versions(environment, self._folder, keep=self._kept(order, target))
            return receipt

    def _kept(self, order: InstallOrder, current: Path | None) -> set[Path]:
        """Returns the versions to keep: the current one, and of built programs the newest of each variant.

        A variant has a second one, from another source, so that `weft runtime use` can undo an update.
        """
        kept = set() if current is None else {current}
        if order.environment.keeps_versions:
            seen = {_identity(receipt) for receipt in map(read_receipt, kept) if receipt is not None}
            for version, receipt in versions_of(order.environment, self._folder).items():
                variant, digest = _identity(receipt)
                others = sum(each == variant for each, _ in seen)
                if (variant, digest) not in seen and others < KEPT_PER_VARIANT:
                    seen.add((variant, digest))
                    kept.add(version.resolve())
        return kept

    async def _build(self, order: InstallOrder, target: Path, temporary: Path) -> pb.InstalledEnvironment:
        build = order.build
        if order.prebuilt is not None:
            await self._fetch_program(order, order.prebuilt, target, temporary)
        elif build is None:
            python = await self._make_python(order, target, temporary)
            await self._install_packages(order, python, temporary)
            for stub in order.declared.stubs:
                _write_stub(target, order.interpreter, stub)
            await self._check(order, [python, "-I", "-c", order.environment.check], temporary)
        else:
            await self._build_program(order, build, target, temporary)
        receipt = pb.InstalledEnvironment(
            variant=variant_number(order.variant),
            lock_digest=order.digest,
            python_version=order.interpreter.version if order.declared.build is None else "",
            folder=str(target),
            installed_bytes=size_on_disk(target),
            install_time=stamp_of(self._clock.utc_now()),
            weft_version=__version__,
        )
        write_receipt(target, receipt)
        return receipt

    async def _build_program(self, order: InstallOrder, build: SourceBuild, target: Path, temporary: Path) -> None:
        """Builds a program, checks it, and puts it into `target`. The unfinished build stays for the next attempt."""
        environment = order.environment
        work = self._work(order)
        python = await self._make_python(order, work / "tools", temporary)
        await self._install_packages(order, python, temporary)

        async def run(command: Sequence[str | Path], read: Callable[[str], object]) -> str:
            return await self._run(order, command, temporary, read)

        def show(step: str, detail: str, done: int, total: int) -> None:
            ended = done == total
            self._show(InstallProgress(step=InstallStep(step), detail=detail, done=done, total=total, ended=ended))

        built = await build_program(environment, build, work, run, show, order.jobs, order.options)
        program = target / "bin" / environment.program
        program.parent.mkdir(parents=True)
        shutil.copy2(built, program)
        for pattern in [pattern for each in build.tool_packages for pattern in each.libraries]:
            (target / "lib").mkdir(exist_ok=True)
            for library in package_folder(work).glob(pattern):
                shutil.copy2(library, target / "lib")
        try:
            await self._check(order, _decoding(build, program, order.variant), temporary)
        except WeftError:
            # The next attempt may have another compiler or toolkit, which a configured build would not notice.
            shutil.rmtree(work / "build", ignore_errors=True)
            raise
        shutil.rmtree(work.parent, ignore_errors=True)

    async def _fetch_program(
        self, order: InstallOrder, prebuilt: PrebuiltProgram, target: Path, temporary: Path
    ) -> None:
        """Downloads a program, checks it, and puts it into `target`. The next attempt continues the download."""
        assert order.declared.build is not None, "the command line has checked it"
        work, stopped = self._work(order), Event()

        def show(size: int, total: int) -> None:
            if stopped.is_set():
                raise InterruptedError
            detail, percent = f"{size_words(size)} loaded", min(99, size * 100 // max(1, total)) if total else 0
            self._show(InstallProgress(step=InstallStep.SOURCE, detail=detail, done=percent, total=100))

        try:
            await asyncio.to_thread(download, prebuilt.url, prebuilt.sha256, work / "download", show)
        finally:
            stopped.set()
        program = unpack_program(work / "download", order.environment.program, target, temporary)
        self._show(InstallProgress(step=InstallStep.SOURCE, detail="complete", done=1, ended=True))
        await self._check(order, _decoding(order.declared.build, program, order.variant), temporary)
        shutil.rmtree(work.parent, ignore_errors=True)

    def _work(self, order: InstallOrder) -> Path:
        """Returns the folder of the unfinished build or download, and removes those of others."""
        folder = self._folder.work(order.environment)
        work = folder / f"{order.variant}-{order.digest.removeprefix(DIGEST_PREFIX)[:VERSION_CHARS]}"
        for other in folder.iterdir() if folder.is_dir() else ():
            if other != work:
                shutil.rmtree(other, ignore_errors=True)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        return work.resolve()

    async def _make_python(self, order: InstallOrder, target: Path, temporary: Path) -> Path:
        version = f"Python {order.interpreter.version}"
        self._show(InstallProgress(step=InstallStep.PYTHON, detail=version))
        lines: list[str] = []
        command: list[str | Path] = [order.interpreter.path, "-I", "-m", "venv", target]
        if await self._run(order, command, temporary, lines.append):
            said = "\n".join(lines).strip()[-MAX_SAID_CHARS:]
            raise WeftError(
                _FAILED,
                f"{order.interpreter.path} cannot make an environment (on Debian and Ubuntu: sudo apt install "
                f"python3-venv): {said}",
            )
        self._show(InstallProgress(step=InstallStep.PYTHON, detail=version, done=1, ended=True))
        return target / "bin" / "python"

    async def _install_packages(self, order: InstallOrder, python: Path, temporary: Path) -> None:
        locks = order.lock_files
        output = PipOutput(package_count(locks))

        def show() -> None:
            self._show(_package_progress(output, temporary))

        async def show_sizes() -> None:
            while True:
                await self._clock.sleep(PROGRESS_SECONDS)
                show()

        def read(line: str) -> None:
            if output.read(line):
                show()

        show()
        sizes = asyncio.create_task(show_sizes())
        try:
            for lock in locks:
                if await self._run(order, [python, "-I", *pip_arguments(lock, PIP_OPTIONS)], temporary, read):
                    why = f"{order.environment.name} was not installed: {output.explanation()}"
                    raise WeftError(_REASONS.get(output.failure, _FAILED), why)
        finally:
            await stop_tasks([sizes])
        done = output.total
        self._show(InstallProgress(step=InstallStep.PACKAGES, detail="installed", done=done, total=done, ended=True))

    async def _check(self, order: InstallOrder, command: Sequence[str | Path], temporary: Path) -> None:
        """Runs the environment's check. Raises BACKEND_ERROR with the end of its output if it fails."""
        is_built = order.declared.build is not None
        detail = f"{order.environment.program} decodes" if is_built else f"{order.environment.name} is imported"
        self._show(InstallProgress(step=InstallStep.CHECK, detail=detail))
        lines: deque[str] = deque(maxlen=MAX_CHECK_LINES)
        if await self._run(order, command, temporary, lines.append):
            got = "was built" if order.prebuilt is None else "was downloaded"
            what = f"it {got}, but does" if is_built else "its packages are installed, but do"
            raise WeftError(
                _FAILED,
                f"{order.environment.name} was not installed: {what} not work here:\n"
                + "\n".join(f"  {line}" for line in lines).rstrip(),
            )
        self._show(InstallProgress(step=InstallStep.CHECK, detail=detail, done=1, ended=True))

    async def _run(
        self, order: InstallOrder, command: Sequence[str | Path], temporary: Path, read: Callable[[str], object]
    ) -> str:
        """Runs a program and returns how it failed; empty: it succeeded."""

        def keep(line: str) -> None:
            self._log(f"{line}\n")
            read(line)

        # pip's temporary files count as progress, and are removed with the rest.
        variables = {"TMPDIR": str(temporary)}
        self._log(f"weft runtime install {order.environment.name}: {' '.join(map(str, command))}\n")
        return await run_program(command, keep, variables=variables, folder=temporary)

    def _require_space(self, order: InstallOrder) -> None:
        needed = needed_bytes(order)
        free = shutil.disk_usage(self._folder.lock_file(order.environment).parent).free
        if free < needed:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"{order.environment.name} ({order.variant}) needs {size_words(needed)} on the disk of "
                f"{self._folder.root}, and {size_words(free)} are free; make room, or choose another with --home",
            )

    def _new_version(self, environment: EngineEnvironment) -> Path:
        """Returns the path of a new version with symbolic links resolved, because its programs contain it."""
        versions = self._folder.versions(environment)
        versions.mkdir(mode=0o700, parents=True, exist_ok=True)
        return versions.resolve() / uuid4().hex[:VERSION_CHARS]


def _decoding(build: SourceBuild, program: Path, variant: Variant) -> list[str | Path]:
    """Returns the command that checks a program."""
    return [sys.executable, "-I", build.check, program, variant.value]


def _identity(receipt: pb.InstalledEnvironment) -> tuple[int, str]:
    return receipt.variant, receipt.lock_digest


def size_on_disk(folder: Path) -> int:
    """Returns the disk usage of a folder; files that vanish during the count are ignored."""
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found += Path(where, name).lstat().st_blocks * _BLOCK_BYTES
    return found


def _package_progress(output: PipOutput, temporary: Path) -> InstallProgress:
    loaded = f"{output.package or 'pip'} ({size_words(size_on_disk(temporary))} loaded)"
    detail = "installing" if output.installing else loaded
    return InstallProgress(step=InstallStep.PACKAGES, detail=detail, done=output.done, total=output.total)


def _write_stub(target: Path, interpreter: Interpreter, stub: str) -> None:
    """Writes the metadata of an empty distribution."""
    name, _, version = stub.partition("==")
    major, minor = interpreter.minor_version
    info = target / "lib" / f"python{major}.{minor}" / "site-packages" / f"{name}-{version}.dist-info"
    info.mkdir()
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Made by weft; it is empty.\n",
        "INSTALLER": "weft\n",
        "RECORD": "".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    for file, text in texts.items():
        (info / file).write_text(text, "utf-8")
