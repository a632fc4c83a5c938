"""Builds of programs from source distributions, in a folder that a later attempt continues.

CMake and Ninja are packages of an environment in that folder, so its path must stay the same.
"""

import asyncio
import io
import re
import shutil
import tarfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from runner_svc.environments.environment import EngineEnvironment, HeaderPackage, SourceBuild
from runner_svc.environments.locked_install import CONNECT_RETRIES, CONNECT_SECONDS
from runner_svc.environments.prebuilt import download
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_SAID_LINES = 20
MAX_STEP_CHARS = 60
_STEP = re.compile(r"\[(?P<done>\d{1,6})/(?P<total>\d{1,6})\] (?P<what>.*)")
_NICE = ("nice", "-n", "10")
"""A build takes all processors for minutes; engines and the mesh go first."""
Run = Callable[[Sequence[str | Path], Callable[[str], object]], Awaitable[str]]
"""Runs a program, passes on its lines, and returns how it failed; empty: it succeeded."""


def require_tools(environment: EngineEnvironment, variant: str, build: SourceBuild) -> None:
    """Checks that the programs of a build are on PATH. Raises INVALID_ARGUMENT with what installs them."""
    missing = [tool for tool in build.tools if tool.packages is None and not tool.is_found]
    if not hasattr(tarfile, "data_filter"):
        raise WeftError(Reason.INVALID_ARGUMENT, f"{environment.name} ({variant}) is built by Python 3.11.4 or later")
    if missing:
        words = "; ".join(f"{' or '.join(tool.names)} ({tool.remedy})" for tool in missing)
        raise WeftError(Reason.INVALID_ARGUMENT, f"{environment.name} ({variant}) is built here and needs {words}")


async def build_program(
    environment: EngineEnvironment,
    build: SourceBuild,
    work: Path,
    run: Run,
    show: Callable[[str, str, int, int], None],
    jobs: int,
    options: Sequence[str] = (),
) -> Path:
    """Builds an environment's program with the tools in `work`/tools, and returns its path.

    `show` gets the step (source or build), what is done, and how many of how many parts are. `options` of CMake are
    added to those of `build`. Raises BACKEND_ERROR with the end of the output, and as `unpack_headers`.
    """
    python, cmake = work / "tools" / "bin" / "python", work / "tools" / "bin" / "cmake"
    source, made = work / "source", work / "build"
    if not source.is_dir():
        show("source", "downloading", 0, 1)
        downloads = work / "download"
        lock = environment.folder / build.source
        await _required(run, [python, "-I", *_DOWNLOAD, "--dest", downloads, "--requirement", lock], environment)
        show("source", "unpacking", 0, 1)
        _unpack(next(downloads.glob("*.tar.gz")), build.inside, source)
        shutil.rmtree(downloads)
    headers = work / "headers"
    if build.headers and not headers.is_dir():
        show("source", "headers", 0, 1)
        await asyncio.to_thread(unpack_headers, build.headers, headers)
    show("source", "complete", 1, 1)
    show("build", "configuring", 0, 1)
    packages = package_folder(work)
    chosen = [
        f"-DCMAKE_MAKE_PROGRAM={cmake.with_name('ninja')}",
        *build.options,
        *options,
        *(option for each in build.tool_packages for option in each.prepare(packages, source)),
        *([f"-DCMAKE_PREFIX_PATH={headers / 'usr'}"] if build.headers else ()),
    ]
    await _required(run, [cmake, "-G", "Ninja", "-S", source, "-B", made, *chosen], environment)

    done = 0

    def read(line: str) -> None:
        nonlocal done
        # A build within the build, such as that of a generator, counts its own steps.
        if (found := _STEP.match(line)) is not None and int(found["total"]) >= done:
            done = int(found["done"])
            show("build", found["what"].rpartition("/")[2][-MAX_STEP_CHARS:], done, int(found["total"]))

    nice = _NICE if shutil.which(_NICE[0]) else ()
    target = ["--target", environment.program, "--parallel", str(jobs)]
    await _required(run, [*nice, cmake, "--build", made, *target], environment, read)
    show("build", "complete", 1, 1)
    return made / "bin" / environment.program


def package_folder(work: Path) -> Path:
    """Returns the folder of the packages in `work`/tools."""
    return next((work / "tools" / "lib").glob("python*")) / "site-packages"


def unpack_headers(packages: Iterable[HeaderPackage], target: Path) -> None:
    """Downloads packages of Debian and unpacks them into `target`, all or none. May block for minutes.

    Raises BACKEND_PROTOCOL_ERROR for a wrong digest or another format, and as `download`.
    """
    temporary = target.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for package in packages:
        file = temporary / package.url.rpartition("/")[2]
        download(package.url, package.sha256, file)
        with tarfile.open(fileobj=io.BytesIO(_debian_content(file.read_bytes()))) as archive:
            archive.extractall(temporary, filter="data")
        file.unlink()
    temporary.rename(target)


def _debian_content(package: bytes) -> bytes:
    """Returns the archive of files in a Debian package, which is a Unix archive (`ar`)."""
    index = len(_AR_MAGIC)
    while package.startswith(_AR_MAGIC) and index + _AR_HEAD_BYTES <= len(package):
        head = package[index : index + _AR_HEAD_BYTES]
        name, size = head[:16].decode("ascii", "replace").strip(), int(head[48:58])
        index += _AR_HEAD_BYTES
        if name.startswith("data.tar"):
            return package[index : index + size]
        index += size + size % 2
    raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "a package of headers is not in Debian's format")


_AR_MAGIC, _AR_HEAD_BYTES = b"!<arch>\n", 60
_DOWNLOAD = (
    *("-m", "pip", "--disable-pip-version-check", "download", "--no-input", "--no-deps"),
    *("--no-binary", ":all:", "--timeout", str(CONNECT_SECONDS), "--retries", str(CONNECT_RETRIES)),
    *("--no-build-isolation", "--require-hashes", "--progress-bar", "off"),
)


async def _required(
    run: Run, command: Sequence[str | Path], environment: EngineEnvironment, read: Callable[[str], object] = str
) -> None:
    lines: list[str] = []

    def keep(line: str) -> None:
        lines.append(line)
        del lines[:-MAX_SAID_LINES]
        read(line)

    if failure := await run(command, keep):
        said = "\n".join(f"  {line}" for line in lines).rstrip()
        raise WeftError(
            Reason.BACKEND_ERROR,
            f"{environment.name} was not built ({failure}); the same command continues where it ended:\n{said}",
        )


def _unpack(archive: Path, inside: str, target: Path) -> None:
    """Unpacks one folder of a source distribution, whole or not at all."""
    temporary = target.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with tarfile.open(archive) as file:
        members = [each for each in file if each.name.split("/", 1)[-1].startswith(f"{inside}/")]
        file.extractall(temporary, members, filter="data")
    (root,) = temporary.iterdir()
    (root / inside).rename(target)
    shutil.rmtree(temporary)
