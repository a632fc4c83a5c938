"""A program on a failing disk: every small file that weft writes, while each call fails, is killed after, or cut off.

python disk_files.py FOLDER [careless]

It ends with an error that names the writer and the call, if a file is read as anything but one of its versions, or an
error does not name it. `careless`, the control: writers that weft does not have.
"""

import asyncio
import errno
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import MappingProxyType

from registry_svc.store.owner_file import create_owner_file, read_owner_file
from router_svc.policy.lost_commits import CommitCount, Loss, LossKind
from router_svc.store.commit_count import CommitCountFile
from runner_svc.added_models_file import AddedModelsFile
from runner_svc.cache.prompt_store import PromptStore
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.repository_files import ModelForm
from runner_svc.session.session_file import SessionFile
from weft.api.runner.v1 import added_model_pb2, model_store_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.models.model_source import parse_source
from weft_app.compose.authority import self_signed_certificate
from weft_testing.failing_disk import EVERY, DiskImage, FailingDisk, entries, write_image

MANY = 9_000
"""Bytes of a version: over several blocks."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes version 1, 2 ... of a file, and returns the version in a folder; 0: none, or one that is known as lost."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], int]
    is_kept: bool = True
    """Whether a version that was written stays until the next one has replaced it."""
    names_file: bool = True
    """Whether its errors are sentences with its path; otherwise its callers make them of an OSError."""


def _version_in(content: bytes | None) -> int:
    if content is None:
        return 0
    assert len(content) == MANY, "it is torn"
    assert content == content[:1] * MANY, "it is torn"
    return content[0]


def _write_small_file(folder: Path, version: int) -> None:
    replace_file(folder / "file", bytes([version]) * MANY)


def _small_file(folder: Path) -> int:
    path = folder / "file"
    return _version_in(path.read_bytes() if path.exists() else None)


def _write_promise(folder: Path, version: int) -> None:
    file = CommitCountFile(folder / "promise")
    file.open(CommitCount(store_id="store-1", commits=version))
    file.close()


def _promise(folder: Path) -> int:
    found = CommitCountFile(folder / "promise").read()
    return 0 if found is None else found.commits


def _write_loss(folder: Path, version: int) -> None:
    promised, found = CommitCount(store_id="store-1", commits=2), CommitCount(store_id="store-1", commits=1)
    CommitCountFile(folder / "promise").write_loss(
        Loss(kind=LossKind.OLDER, promised=promised, found=found), f"version {version}"
    )


def _loss(folder: Path) -> int:
    """An operator is told of it, or it was never noticed."""
    notice = CommitCountFile(folder / "promise").notice()
    return 1 if "version 1" in notice else 2 if "version 2" in notice else 3 if "version 3" in notice else 0


def _write_added(folder: Path, version: int) -> None:
    model = added_model_pb2.AddedModel(name=f"m{version}")
    AddedModelsFile(folder / "added").write([model] * 200)


def _added(folder: Path) -> int:
    found = AddedModelsFile(folder / "added").read()
    assert len(found) in (0, 200)
    return int(found[0].name[1:]) if found else 0


def _write_session(folder: Path, version: int) -> None:
    SessionFile(folder / "session").keep(f"ses-{version:032d}")


def _session(folder: Path) -> int:
    return int(SessionFile(folder / "session").read().removeprefix("ses-") or 0)


def _kept_prompt(version: int) -> KeptPrompt:
    marks = (bytes([version]),)
    return KeptPrompt(name=f"p{version}", partition=Partition("a"), marks=marks, byte_count=MANY, identity="m:1")


def _write_prompt(folder: Path, version: int) -> None:
    async def write() -> None:
        store = PromptStore(folder / "prompts", 1 << 20)
        await store.open()
        store.put(_kept_prompt(version), BytesIO(bytes([version]) * MANY))
        await store.settle()

    asyncio.run(write())


def _prompt(folder: Path) -> int:
    """The latest of those that can be used."""

    async def read() -> int:
        store, target = PromptStore(folder / "prompts", 1 << 20), folder / "state"
        await store.open()
        versions = [_version_in(target.read_bytes()) for prompt in store.prompts if await store.read(prompt, target)]
        return max(versions, default=0)

    return asyncio.run(read())


_SOURCE = parse_source("hf:some/repo:Q4_0", "source")


def _write_model(folder: Path, version: int) -> None:
    store = ModelStore(folder / "models")
    with store.explained():
        store.create()
        content = bytes([version]) * MANY
        digest, partial = hashlib.sha256(content).hexdigest(), store.partial / "part"
        partial.write_bytes(content)
        store.add_blob(partial, digest)
        file = model_store_pb2.StoredFile(path="model.gguf", sha256=digest, size_bytes=MANY)
        model = model_store_pb2.StoredModel(files=[file], main_path="model.gguf")
        store.publish(_SOURCE, ModelForm.GGUF, model)


def _model(folder: Path) -> int:
    found = ModelStore(folder / "models").find(_SOURCE)
    return 0 if found is None else _version_in(Path(found.path).read_bytes())


def _create_owner_file(folder: Path, version: int) -> None:
    """Version 1 is no file."""
    if version > 1:
        create_owner_file(folder / "file", bytes([version]) * MANY, "pepper_file")


def _write_certificate(folder: Path, version: int) -> None:
    """Version 1 is no certificate."""
    if version > 1:
        self_signed_certificate(folder / "relay", [])


def _certificate(folder: Path) -> int:
    """It is there and whole, or is made when it is needed."""
    is_reachable = (folder / "relay" / "cert.pem").exists()
    self_signed_certificate(folder / "relay", [])
    return 2 if is_reachable else 1


WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        "replaced file": Writer(_write_small_file, _small_file, names_file=False),
        "owner's file": Writer(
            _create_owner_file,
            lambda folder: _version_in(read_owner_file(folder / "file", "pepper_file", max_bytes=MANY) or b"\1" * MANY),
        ),
        "promise": Writer(_write_promise, _promise, is_kept=False, names_file=False),
        "loss report": Writer(_write_loss, _loss, names_file=False),
        "added models": Writer(_write_added, _added, names_file=False),
        "session": Writer(_write_session, _session),
        "stored prompt": Writer(_write_prompt, _prompt, is_kept=False),
        "stored model": Writer(_write_model, _model),
        "relay certificate": Writer(_write_certificate, _certificate),
    }
)


def _versions(folder: Path, writer: Writer, allowed: set[int], when: str) -> int:
    found = writer.read(folder)
    assert found in (allowed if writer.is_kept else allowed | {0}), f"{when}: version {found} instead of {allowed}"
    return found


def fail_each_call(writer: Writer, folder: Path) -> None:
    """Every call fails once, and then with all that follow."""
    disk, began = FailingDisk.of_this_process(), folder / "begin"
    began.mkdir(parents=True)
    writer.write(began, 1)
    for error, calls, is_torn in (
        (errno.EIO, 1, True),
        (errno.ENOSPC, EVERY, False),
        (errno.EROFS, EVERY, False),
    ):
        for number in range(1, 200):
            place = folder / "place"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(began, place, symlinks=True)
            when = f"call {number} with {errno.errorcode[error]}"
            with disk.watching(place, error=error, fails_at=number, calls=calls, is_torn=is_torn):
                failed = _failure(writer, place)
            if disk.seen < number:
                break
            assert not isinstance(failed, OSError) or not writer.names_file, f"{when}: its error is no sentence"
            assert not isinstance(failed, WeftError) or str(place) in failed.message, f"{when}: {failed}"
            _versions(place, writer, {1, 2}, when)
            writer.write(place, 3)
            assert writer.read(place) in (2, 3), f"{when}: it is not written when the disk is good again"
        else:
            raise AssertionError("it does not end")


def _failure(writer: Writer, place: Path) -> WeftError | OSError | None:
    try:
        writer.write(place, 2)
    except (WeftError, OSError) as error:
        return error
    return None


def crash_after_each_call(writer: Writer, folder: Path) -> None:
    """A kill and a power cut after every call of writing version 2."""
    place, record, image_folder = folder / "place", folder / "record", folder / "image"
    place.mkdir(parents=True)
    writer.write(place, 1)
    begin = {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file() and not path.is_symlink()}
    with FailingDisk.of_this_process().watching(place, record=record):
        writer.write(place, 2)
    disk = DiskImage(begin)
    for number, entry in enumerate(entries(record), 1):
        disk.apply(entry)
        for what, image in _images(disk):
            shutil.rmtree(image_folder, ignore_errors=True)
            # Links and folders are those of the end: what they name may lack.
            shutil.copytree(place, image_folder, symlinks=True, ignore=_files_only)
            write_image(image, place, image_folder)
            _versions(image_folder, writer, {1, 2}, f"{what} after call {number} ({entry.call.name} {entry.path})")


def _images(disk: DiskImage) -> Iterator[tuple[str, Mapping[str, bytes]]]:
    yield "kill", disk.after_a_kill()
    for kept in (0.0, 0.5, 1.0):
        yield f"power cut ({kept:g})", disk.after_a_power_cut(kept)


def _files_only(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if (path := Path(folder) / name).is_file() and not path.is_symlink()}


def _write_over(folder: Path, version: int) -> None:
    (folder / "file").write_bytes(bytes([version]) * MANY)


def _rename_unsynced(folder: Path, version: int) -> None:
    (folder / "new").write_bytes(bytes([version]) * MANY)
    (folder / "new").replace(folder / "file")


CARELESS: Mapping[str, Writer] = MappingProxyType(
    {
        "written over": Writer(_write_over, _small_file, names_file=False),
        "renamed unsynced": Writer(_rename_unsynced, _small_file, names_file=False),
    }
)


def main(folder: Path, writers: Mapping[str, Writer]) -> None:
    """Every writer; the errors of all are shown."""
    wrong = []
    for name, writer in writers.items():
        for check in (fail_each_call, crash_after_each_call):
            try:
                check(writer, folder / name.replace(" ", "-").replace("'", "") / check.__name__)
            except Exception as error:  # noqa: BLE001 - it is the finding
                wrong.append(f"{name}, {check.__name__}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]), CARELESS if "careless" in sys.argv[2:] else WRITERS)
