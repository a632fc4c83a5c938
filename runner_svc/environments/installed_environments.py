"""Receipts of installed environments, the status of each environment of a home, and the lock for changing it."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from runner_svc.environments.environment import EngineEnvironment, Variant
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.environments.prebuilt import DIGEST_PREFIX
from weft.api.runner.v1 import environment_pb2 as pb
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file, replace_file

RECEIPT_NAME = "environment.json"
MAX_RECEIPT_BYTES = 65_536
CLAIM_ATTEMPTS = 20
CLAIM_PAUSE_SECONDS = 0.05
"""Pause between attempts to lock: `weft runtime list` also holds a lock for a moment."""


def variant_number(variant: Variant) -> pb.EnvironmentVariant.ValueType:
    """Converts a variant to its value in messages."""
    return pb.EnvironmentVariant.Value(f"ENVIRONMENT_VARIANT_{variant.name}")


def variant_of(receipt: pb.InstalledEnvironment) -> Variant | None:
    """Returns the variant of a receipt; None: unknown to this version of weft."""
    return next((variant for variant in Variant if variant_number(variant) == receipt.variant), None)


def lock_digest(environment: EngineEnvironment, variant: Variant) -> str:
    """Returns a digest of everything that determines the installed packages."""
    declared = environment.variants[variant]
    digest = hashlib.sha256()
    build = declared.build
    words = declared.stubs
    locks = environment.lock_files(variant)
    if build is not None:
        packages = [tool.packages.lock for tool in build.tools if tool.packages is not None]
        words = (*words, *build.options, *(header.sha256 for header in build.headers))
        locks = (*locks, *(environment.folder / lock for lock in (build.source, *packages)))
    for part in (*(lock.read_bytes() for lock in locks), *map(str.encode, words)):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def read_receipt(folder: Path) -> pb.InstalledEnvironment | None:
    """Returns the receipt in an environment's folder; None: missing or unreadable."""
    with suppress(OSError, ParseError, UnicodeDecodeError), (folder / RECEIPT_NAME).open("rb") as file:
        return Parse(file.read(MAX_RECEIPT_BYTES).decode(), pb.InstalledEnvironment(), ignore_unknown_fields=True)
    return None


def write_receipt(folder: Path, receipt: pb.InstalledEnvironment) -> None:
    """Writes the receipt of an environment. Raises OSError."""
    replace_file(folder / RECEIPT_NAME, MessageToJson(receipt).encode())


def versions_of(environment: EngineEnvironment, folder: EnvironmentFolder) -> dict[Path, pb.InstalledEnvironment]:
    """Returns the receipts of all complete versions of an environment by their folder, newest first."""
    versions = folder.versions(environment)
    found = {each: read_receipt(each) for each in (versions.iterdir() if versions.is_dir() else ())}
    whole = [(each, receipt) for each, receipt in found.items() if receipt is not None]
    return dict(sorted(whole, key=lambda each: each[1].install_time.ToNanoseconds(), reverse=True))


def status_of(environment: EngineEnvironment, folder: EnvironmentFolder) -> pb.EnvironmentStatus:
    """Returns the status of an environment in this home. Never raises."""
    status = pb.EnvironmentStatus(
        name=environment.name,
        summary=environment.summary,
        variants=[variant_number(variant) for variant in environment.variants],
    )
    command, link = folder.install_command(environment.name), folder.link(environment)
    receipt = read_receipt(link)
    if receipt is not None:
        status.installed.CopyFrom(receipt)
    if environment.keeps_versions:
        status.versions.extend(versions_of(environment, folder).values())
    if is_changing(environment, folder):
        status.state, status.detail = pb.ENVIRONMENT_STATE_CHANGING, "another process is installing or removing it"
    elif not link.is_symlink():
        status.state, status.detail = pb.ENVIRONMENT_STATE_NOT_INSTALLED, command
    elif (fault := _fault(environment, link, receipt)) is not None:
        status.state, status.detail = pb.ENVIRONMENT_STATE_BROKEN, f"{fault}; {command} --reinstall"
    elif receipt is not None and not _is_current(environment, receipt):
        status.state, status.detail = pb.ENVIRONMENT_STATE_OUTDATED, f"weft has newer lock files; {command}"
    else:
        status.state = pb.ENVIRONMENT_STATE_INSTALLED
    return status


def _is_current(environment: EngineEnvironment, receipt: pb.InstalledEnvironment) -> bool:
    variant = variant_of(receipt)
    if variant is None or variant not in environment.variants:
        return False
    # Lock files do not determine a prebuilt program.
    return receipt.lock_digest.startswith(DIGEST_PREFIX) or receipt.lock_digest == lock_digest(environment, variant)


def _fault(environment: EngineEnvironment, link: Path, receipt: pb.InstalledEnvironment | None) -> str | None:
    """Returns why an installed environment cannot be used; None: no fault is known."""
    if receipt is None:
        return "its receipt cannot be read"
    folder = link.resolve()
    if receipt.folder != str(folder):
        return f"it was moved here from {receipt.folder}, which its programs refer to"
    if not (link / "bin" / environment.program).exists():
        missing = f"its Python {receipt.python_version}" if environment.program == "python" else environment.program
        return f"{missing} is not on this machine any more"
    return None


@contextmanager
def changing(environment: EngineEnvironment, folder: EnvironmentFolder) -> Iterator[None]:
    """Locks an environment for the block. The lock ends with the process.

    Raises ALREADY_EXISTS if another process holds the lock, and INVALID_ARGUMENT if the folder is not writable or its
    place is taken by something that weft did not create.
    """
    link, path = folder.link(environment), folder.lock_file(environment)
    if link.exists() and not link.is_symlink():
        raise invalid_field("NAME", f"{link} was not made by weft; move it away")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.open("a") as lock:
            if not any(_locks(lock) for _ in range(CLAIM_ATTEMPTS)):
                raise WeftError(
                    Reason.ALREADY_EXISTS, f"another process is installing or removing {environment.name}; wait for it"
                )
            yield
    except OSError as error:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"{error.filename or folder.root} cannot be used: {error.strerror}; choose another home with --home",
        ) from error


def _locks(lock: TextIO) -> bool:
    try:
        lock_file(lock)
    except OSError:
        time.sleep(CLAIM_PAUSE_SECONDS)
        return False
    return True


def is_changing(environment: EngineEnvironment, folder: EnvironmentFolder) -> bool:
    """Whether a process is installing or removing an environment."""
    try:
        lock = folder.lock_file(environment).open("r")
    except OSError:
        return False
    with lock:
        try:
            lock_file(lock, is_shared=True)
        except OSError:
            return True
        return False
