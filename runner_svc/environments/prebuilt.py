"""Programs that were built elsewhere: downloaded from a URL, compared with a digest, and unpacked."""

import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from runner_svc.model_store.http_file import FileOrder, FileTransfer, TransferPorts, require_allowed_url
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

DIGEST_PREFIX = "sha256:"
"""Prefix of the digest in the receipt of a prebuilt program."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PrebuiltProgram:
    """A program, or an archive (tar, zip) that contains it with its libraries beside it or in `../lib`."""

    url: str
    sha256: str

    @property
    def digest(self) -> str:
        """Its digest in a receipt."""
        return f"{DIGEST_PREFIX}{self.sha256}"


def prebuilt_program(url: str, sha256: str) -> PrebuiltProgram:
    """Returns the program of a URL and a digest. Raises INVALID_ARGUMENT if one is missing or malformed."""
    digest = sha256.lower().removeprefix(DIGEST_PREFIX)
    if not _SHA256.fullmatch(digest):
        raise invalid_field("--sha256", "the 64 hexadecimal digits of the file at --url are required")
    if not urlsplit(url).netloc:
        raise invalid_field("--url", "the URL of a program, or of an archive that contains it, is required")
    require_allowed_url(url, allow_http=False)
    return PrebuiltProgram(url, digest)


def download(url: str, sha256: str, file: Path, on_bytes: Callable[[int, int], None] = lambda *_: None) -> None:
    """Downloads a file, continuing an earlier attempt. May block for long. Raises as `FileTransfer.run`.

    `on_bytes` gets the size so far and that of the file; 0: not known.
    """
    import httpx2  # noqa: PLC0415 - only this command needs it

    name = urlsplit(url).path.rpartition("/")[2] or url
    loaded = total = 0

    def note_bytes(size: int) -> None:
        nonlocal loaded
        loaded = size
        on_bytes(loaded, total)

    def note_missing(missing_bytes: int) -> None:
        nonlocal total
        total = loaded + missing_bytes

    with httpx2.Client() as client:
        ports = TransferPorts(client=client, on_bytes=note_bytes, on_total=note_missing)
        FileTransfer(FileOrder(name=name, url=url, partial=file, sha256=sha256), ports).run()


def unpack_program(file: Path, program: str, target: Path, temporary: Path) -> Path:
    """Puts a program with its libraries into `target`/bin and `target`/lib, and returns its path.

    Raises INVALID_ARGUMENT for an archive that cannot be read, or without the program.
    """
    placed = target / "bin" / program
    unpacked = temporary / "unpacked"
    try:
        if tarfile.is_tarfile(file):
            with tarfile.open(file) as archive:
                archive.extractall(unpacked, filter="data")
        elif zipfile.is_zipfile(file):
            shutil.unpack_archive(file, unpacked, "zip")
        else:
            placed.parent.mkdir(parents=True)
            shutil.copyfile(file, placed)
    except (tarfile.TarError, zipfile.BadZipFile, shutil.ReadError) as error:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the archive cannot be read: {error}") from error
    if unpacked.is_dir():
        files = filter(Path.is_file, unpacked.rglob(program))
        found = min(files, key=lambda path: len(path.parts), default=None)
        if found is None:
            raise invalid_field("--url", f"the archive does not contain {program}")
        shutil.copytree(found.parent, placed.parent, symlinks=True)
        libraries = found.parent.parent / "lib"
        if found.parent.name == "bin" and libraries.is_dir():
            shutil.copytree(libraries, target / "lib", symlinks=True)
    placed.chmod(0o755)
    return placed
