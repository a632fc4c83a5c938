"""`weft runtime`: environments and programs of engines. No mesh needs to run."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from runner_svc.environments import cuda_toolkit
from runner_svc.environments.environment import (
    EngineEnvironment,
    Variant,
    VariantChoice,
    choose_variant,
    find_interpreter,
)
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.installed_environments import read_receipt, status_of, variant_of, versions_of
from runner_svc.environments.installer import DEFAULT_SECONDS, EnvironmentInstaller, InstallOrder, InstallProgress
from runner_svc.environments.prebuilt import prebuilt_program
from runner_svc.environments.removal import remove_environment, remove_version, use_version
from runner_svc.runtimes.table import environments, require_environment, users_of
from weft.api.runner.v1 import environment_pb2 as pb
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.machine_limits import usable_processors
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.units import size_words
from weft_app.cli.mesh_api import Document
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, ended_by_signals
from weft_app.cli.output import Listing, ProgressStyle, custom_columns, print_document, shown_progress
from weft_app.cli.terminal import safe_text, say
from weft_app.compose.engine_reports import card_capabilities, has_nvidia_cards
from weft_app.compose.home import WeftHome

MAX_LOG_BYTES = 4 * 1024**2
_LINES = 10
"""Number of progress lines without a terminal."""

app = typer.Typer()
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The environment; `weft runtime list` shows all.")]

VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="A kept version: its variant, or its id in `weft runtime list`.")
]

_ENVIRONMENTS = Listing(
    columns=custom_columns(
        "NAME:name STATE:state:spaced VARIANT:installed.variant? PYTHON:installed.pythonVersion? "
        "SIZE:installed.installedBytes:size RUNTIMES:runtimes? DETAIL:detail|summary"
    ),
    kind="EngineEnvironmentList",
)


def _line(progress: InstallProgress) -> str:
    """Returns a progress line, rounded so that few lines differ."""
    if progress.ended or progress.done in (0, progress.total):
        return f"{progress.step}: {progress.detail}"
    share = progress.done * _LINES // progress.total
    return f"{progress.step}: {share * 100 // _LINES} % of {progress.total}"


_PROGRESS = ProgressStyle(
    line=_line,
    columns=lambda: (
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    ),
    bar=lambda progress: {
        # The progress of unpacking is unknown.
        "total": progress.total if progress.done < progress.total or progress.ended else None,
        "completed": progress.done,
        "description": safe_text(f"{progress.step} {progress.done}/{progress.total}: {progress.detail}"),
    },
)


@app.command("install")
def install(
    name: NameArgument,
    variant: Annotated[
        VariantChoice, typer.Option(help="What to compute on; auto detects the hardware.")
    ] = VariantChoice.AUTO,
    *,
    python: Annotated[
        Path | None, typer.Option(help="Python for the environment. Default: weft's own, or one on PATH.")
    ] = None,
    reinstall: Annotated[bool, typer.Option("--reinstall", help="Reinstall even if it is up to date.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of the installation in seconds.")] = (DEFAULT_SECONDS),
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Number of compilers at a time. Default: all processors.")
    ] = None,
    cuda_architectures: Annotated[
        str | None,
        typer.Option(help="Compute capabilities to build for, such as 8.6,9.0. Default: those of the cards here."),
    ] = None,
    url: Annotated[
        str, typer.Option(help="Install this built program, or the one in this archive, instead of building it.")
    ] = "",
    sha256: Annotated[str, typer.Option(help="SHA-256 of the file at --url.")] = "",
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Install an engine's environment, with locked versions and hashes. It replaces an older one once it works.

    llama_server is compiled for this machine and checked with a tiny model before it is used. Earlier builds are kept,
    two of each variant; an interrupted build continues with the same command. Tool output goes to
    `logs/runtime-NAME.log` of the home.

    Example: weft runtime install llama_server --variant vulkan
    """
    environment = require_environment(name)
    folder = _home(home)
    chosen = choose_variant(environment, variant, has_cards=has_nvidia_cards)
    prebuilt = prebuilt_program(url, sha256) if url or sha256 else None
    build = None if prebuilt is not None else environment.variants[chosen].build
    if prebuilt is not None and environment.variants[chosen].build is None:
        raise invalid_field("--url", f"{name} is not one program")
    if cuda_architectures is not None and (build is None or chosen is not Variant.CUDA):
        raise invalid_field(cuda_toolkit.OPTION, "is for programs that are built with --variant cuda")
    before = _status(environment, folder)
    asked_anew = reinstall or prebuilt is not None or cuda_architectures is not None
    if not asked_anew and (before.state == pb.ENVIRONMENT_STATE_INSTALLED and variant_of(before.installed) is chosen):
        _report(before, output, f"{name} ({chosen}) is installed\n")
        return
    order = InstallOrder(
        environment=environment,
        variant=chosen,
        interpreter=find_interpreter(environment, python),
        seconds=timeout,
        jobs=jobs or usable_processors(),
        options=(
            cuda_toolkit.architecture_options(cuda_architectures, card_capabilities)
            if build is not None and chosen is Variant.CUDA
            else ()
        ),
        prebuilt=prebuilt,
    )
    folder.create()
    # An end removes all but the progress of a build.
    with ended_by_signals(), shown_progress(_PROGRESS) as show:
        log = folder.log_file(f"runtime-{name}", MAX_LOG_BYTES)
        installer = EnvironmentInstaller(folder.environments, SystemClock(), show, log.write)
        asyncio.run(installer.install(order))
    size = size_words(_status(environment, folder).installed.installed_bytes)
    place = folder.environments.link(environment)
    _report(_status(environment, folder), output, f"{name} ({chosen}) is installed: {size} in {place}\n")


@app.command("list")
def list_environments(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List all environments with their state on this home.

    Example: weft runtime list -o json
    """
    folder = _home(home)
    found = [_status(environment, folder) for environment in environments()]
    if output is OutputFormat.TABLE:
        _ENVIRONMENTS.print([row for status in found for row in _rows(status)], output)
    else:
        _ENVIRONMENTS.print(list(map(document_of, found)), output)


def _rows(status: pb.EnvironmentStatus) -> Iterator[Document]:
    """Yields the row of an environment, and one for each other version that is kept."""
    yield document_of(status)
    for each in status.versions:
        if each.folder != status.installed.folder:
            kept = pb.EnvironmentStatus(name=status.name, installed=each, runtimes=status.runtimes)
            use = f"weft runtime use {status.name} {Path(each.folder).name}"
            yield {**document_of(kept), "state": "kept", "detail": use}


@app.command("use")
def use(name: NameArgument, version: VersionArgument, home: HomeOption = DEFAULT_HOME) -> None:
    """Choose a kept version. Engines use it from the next start of their runner.

    Example: weft runtime use llama_server cpu
    """
    environment, folder = require_environment(name), _home(home).environments
    chosen = _version(environment, folder, version)
    use_version(environment, folder, chosen)
    receipt = read_receipt(chosen)
    variant = None if receipt is None else variant_of(receipt)
    say(f"{name} uses {chosen.name} ({variant}) from the next start of its runners: weft mesh restart\n")


def _version(environment: EngineEnvironment, folder: EnvironmentFolder, word: str) -> Path:
    """Returns the newest kept version with a variant or id. Raises INVALID_ARGUMENT, NOT_FOUND."""
    if not environment.keeps_versions:
        raise invalid_field("VERSION", f"{environment.name} has one version")
    found = versions_of(environment, folder)
    for version, receipt in found.items():
        if word in (version.name, variant_of(receipt)):
            return version
    known = ", ".join(f"{version.name} ({variant_of(receipt)})" for version, receipt in found.items()) or "none"
    raise WeftError(
        Reason.NOT_FOUND, f"{environment.name} has no version {word[:64]!r}; kept: {known}", metadata={"version": word}
    )


@app.command("remove")
def remove(
    name: NameArgument,
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help="Only this kept version: its variant or id.", show_default=False)
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Remove it even if an engine uses it; the engine may then fail.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Remove an environment from the disk. It is refused while an engine uses it.

    Example: weft runtime remove vllm
    """
    environment = require_environment(name)
    if version:
        folder = _home(home).environments
        chosen = _version(environment, folder, version)
        if not force and folder.link(environment).resolve() == chosen.resolve():
            _require_unused(environment, _home(home))
        remove_version(environment, folder, chosen, force=force)
        say(f"{name} {chosen.name} removed\n")
        return
    if not force:
        _require_unused(environment, _home(home))
    removed = remove_environment(environment, _home(home).environments, force=force)
    say(f"{name} removed\n" if removed else f"{name} is not installed\n")


def _require_unused(environment: EngineEnvironment, home: WeftHome) -> None:
    """Checks that no runner of this home's mesh uses an environment for its engines, including hibernating ones.

    Raises RESOURCE_IN_USE naming the runners. `remove_environment` searches for processes.
    """
    # Imported here: other commands of this module need no mesh.
    from weft.documents.resource_kinds import ResourceKind  # noqa: PLC0415
    from weft_app.cli.mesh_api import connect  # noqa: PLC0415

    if home.running() is None:
        return
    runtimes, host = {runtime.name for runtime in users_of(environment)}, socket.gethostname()
    # If no mesh answers, running engines are still found by their processes.
    found = []
    with suppress(WeftError), connect(home.root) as mesh:
        found = mesh.documents(ResourceKind.RUNNER)
    users = [
        each["name"]
        for each in found
        if each["status"]["state"] == "active"
        if each["status"].get("runtime") in runtimes and each["status"].get("host") == host
    ]
    if users:
        raise WeftError(
            Reason.RESOURCE_IN_USE,
            f"{environment.name} is used by {', '.join(users)} of the mesh on {home.root}; stop it, or remove the "
            "environment with --force",
        )


def _home(home: Path) -> WeftHome:
    return WeftHome(home.expanduser().absolute())


def _status(environment: EngineEnvironment, home: WeftHome) -> pb.EnvironmentStatus:
    status = status_of(environment, home.environments)
    status.runtimes.extend(runtime.name for runtime in users_of(environment))
    return status


def _report(status: pb.EnvironmentStatus, output: OutputFormat, text: str) -> None:
    if output is OutputFormat.TABLE:
        say(text)
    else:
        print_document(document_of(status), output)
