"""Prompts on disk, encrypted: the cached prompts of engines that ended, for their next start."""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from errno import ENOSPC
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec

from runner_svc.backend.port import Backend
from runner_svc.cache.restore_checks import RestoreChecks
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.kept_prompts import KeptPrompt, KeptPrompts
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.telemetry.log import get_logger

MAX_FOLLOWERS = 64
"""Maximum callers that follow which prompts are stored."""
MIN_FREE_BYTES = 1024 * 1024 * 1024
"""Nothing is stored that would leave less free disk space than this."""
MAX_AGE_SECONDS = 7 * 86_400.0
"""A prompt that was not used for this long is deleted."""
PIECE_BYTES = 4 * 1024 * 1024
"""Bytes that are encrypted together."""
KEY_BYTES = 32
PRIOR_BYTES_PER_SECOND = 200e6
"""Assumed speed of a restore until one was measured: decryption and the engine's own reading."""
MIN_MEASURED_BYTES = PIECE_BYTES
"""Less shows no speed, only what each restore costs at least."""
NEWEST_SHARE = 0.3
"""Weight of the newest restore in the measured speed."""
_SUFFIX, _DRAFT_SUFFIX = ".prompt", ".new"
_KEY, _CHECKS = "key", "checks"
_NONCE_BYTES = 8
_COUNT_BYTES = 4
_PRIVATE = 0o600

log = get_logger("weft.runner")


class StoreFollowers:
    """Wakes its followers after changes. Used on the event loop only."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change
        self._events: set[asyncio.Event] = set()
        self._has_ended = False

    def note_change(self) -> None:
        """Records that the store has changed."""
        self.on_change()
        for event in self._events:
            event.set()

    def end(self) -> None:
        """Ends all followers: the runner stops."""
        self._has_ended = True
        self.note_change()

    async def changes(self) -> AsyncGenerator[None]:
        """Yields immediately, then after changes. Raises TOO_MANY_RESOURCES beyond MAX_FOLLOWERS."""
        if len(self._events) >= MAX_FOLLOWERS:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"{MAX_FOLLOWERS} callers follow the stored prompts, the limit")
        event = asyncio.Event()
        self._events.add(event)
        try:
            while not self._has_ended:
                yield
                await event.wait()
                event.clear()
        finally:
            self._events.discard(event)


class _Header(msgspec.Struct):
    identity: str
    tenant: str
    tag: str
    adapter: str
    marks: tuple[bytes, ...]
    byte_count: int
    token_count: int
    seconds: float
    digests: tuple[int, ...] = ()
    kind: str = ""


class DamagedPromptError(Exception):
    """A file that is not as it was written."""


class PromptStore:
    """The stored prompts of a runner, within a size budget. Used on the event loop; threads read and write the files.

    Each file is encrypted with AES-256-GCM by a key in the same folder and bound to its name: it protects copies of
    single files, and damaged or exchanged ones are noticed.
    """

    def __init__(self, folder: Path, budget_bytes: int, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change`: called when its prompts change, or which of them the engine can restore."""
        self.prompts = KeptPrompts(budget_bytes)
        self.followers = StoreFollowers(on_change)
        self.checks = RestoreChecks(folder / _CHECKS)
        self.bytes_per_second = PRIOR_BYTES_PER_SECOND
        """Speed of restores."""
        self._folder = folder
        self._key = b""
        self._writing: dict[asyncio.Task[None], KeptPrompt] = {}
        self._undeleted: list[KeptPrompt] = []
        """Prompts that are not used any more, whose files are still there."""

    async def open(self) -> None:
        """Reads which prompts earlier processes stored; before that, nothing is stored or found."""
        try:
            self._key, found = await asyncio.to_thread(self._scan)
        except OSError as error:
            log.warning("prompts are not stored", folder=str(self._folder), error=error.strerror)
            return
        for prompt in found:
            self._delete(self.prompts.add(prompt))
        self.followers.note_change()

    async def check(self, backend: Backend) -> None:
        """Tests whether a started engine continues restored prompts, unless nothing can be stored."""
        if self._key:
            await self.checks.examine(backend)

    async def settle(self, is_awaited: Callable[[KeptPrompt], bool] = lambda _: True) -> None:
        """Waits until these prompts are written. Default: all."""
        if self._writing and (writing := [task for task, prompt in self._writing.items() if is_awaited(prompt)]):
            await asyncio.wait(writing)

    def put(self, prompt: KeptPrompt, state: BinaryIO) -> None:
        """Stores an engine's state in the background, unless its prompt is flushed meanwhile; closes the file."""
        task = start_task(self._put(prompt, state, self.prompts.flush_count), name="store-prompt")
        self._writing[task] = prompt
        task.add_done_callback(self._writing.pop)

    async def read(self, prompt: KeptPrompt, target: Path) -> bool:
        """Writes a prompt's state to a file for its engine. Returns whether it could; a damaged one is deleted."""
        self.prompts.use(prompt)
        try:
            await asyncio.to_thread(self._unseal, self._file(prompt.name), target)
        except (FileNotFoundError, DamagedPromptError) as error:
            log.warning("a stored prompt is damaged and was deleted", error=type(error).__name__)
            self.drop(prompt)
        except OSError as error:
            log.warning("a stored prompt cannot be read", error=error.strerror)
        else:
            return True
        return False

    def pieces(self, prompt: KeptPrompt) -> Iterator[bytes]:
        """Yields the pieces of a prompt's state. Raises DamagedPromptError and OSError; may take long."""
        pieces = _pieces(self._key, self._file(prompt.name))
        next(pieces)
        yield from pieces

    def drop(self, prompt: KeptPrompt) -> None:
        """Deletes a prompt that cannot be used."""
        self.prompts.drop(prompt)
        self._delete([prompt])
        self.followers.note_change()

    def forget(self, tenant: str | None, tag: str | None, model: str | None = None) -> None:
        """Deletes the prompts of a tenant, a tag and a model; None: any."""
        self._delete(self.prompts.forget(tenant, tag, model))
        self.followers.note_change()

    def is_sooner(self, prompt: KeptPrompt, share: float) -> bool:
        """Whether restoring a prompt is expected to take less time than processing this share of its tokens again.

        A prompt of unknown processing time is restored.
        """
        return not prompt.seconds or prompt.byte_count / self.bytes_per_second < share * prompt.seconds

    def note_restored(self, prompt: KeptPrompt, seconds: float) -> None:
        """Learns the speed of restores from one."""
        if seconds > 0 and prompt.byte_count >= MIN_MEASURED_BYTES:
            self.bytes_per_second += NEWEST_SHARE * (prompt.byte_count / seconds - self.bytes_per_second)

    def require_deleted(self) -> None:
        """Raises SERVICE_UNAVAILABLE if forgotten prompts are still on disk, where the next process would find them."""
        if self._undeleted:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"{len(self._undeleted)} stored prompts cannot be deleted from {self._folder}; make its disk writable, "
                "and flush again",
            )

    async def _put(self, prompt: KeptPrompt, state: BinaryIO, flush_count: int) -> None:
        with state:
            room = self.prompts.make_room(prompt.byte_count) if self._key else None
            if room is None:
                return
            if room:
                self._delete(room)
                self.followers.note_change()  # the write may fail
            now = asyncio.get_running_loop().time
            begin = now()
            try:
                await asyncio.to_thread(self._seal, prompt, state)
            except OSError as error:
                log.warning("a prompt was not stored", folder=str(self._folder), error=str(error)[:256])
                with suppress(OSError):
                    self._file(prompt.name).with_suffix(_DRAFT_SUFFIX).unlink()
                return
        # A restore is as fast. Without this, a store that is expected to be too slow would never be measured.
        if prompt.byte_count >= MIN_MEASURED_BYTES and (seconds := now() - begin) > 0:
            self.bytes_per_second = max(self.bytes_per_second, prompt.byte_count / seconds)
        is_flushed = self.prompts.flush_count != flush_count
        self._delete([prompt] if is_flushed else self.prompts.add(prompt))
        self.followers.note_change()

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _delete(self, prompts: list[KeptPrompt]) -> None:
        """Deletes files, and those that earlier calls could not delete."""
        self._undeleted = [prompt for prompt in (*self._undeleted, *prompts) if not self._is_deleted(prompt)]

    def _is_deleted(self, prompt: KeptPrompt) -> bool:
        try:
            self._file(prompt.name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a stored prompt cannot be deleted", folder=str(self._folder), error=error.strerror)
            return False
        return True

    def _scan(self) -> tuple[bytes, list[KeptPrompt]]:
        """Returns the key and the stored prompts, least recently used first. Deletes files that it cannot use."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = _key_in(self._folder / _KEY)
        self.checks.read()
        found: list[tuple[float, KeptPrompt]] = []
        for file in self._folder.iterdir():
            if file.name in (_KEY, _CHECKS):
                continue
            try:
                used_at = file.stat().st_mtime
                is_used = file.suffix == _SUFFIX and used_at + MAX_AGE_SECONDS > time.time()
                if (prompt := _prompt_in(key, file) if is_used else None) is None:
                    file.unlink()
                else:
                    found.append((used_at, prompt))
            except OSError as error:
                # Others put files there, too: a disk that is mounted there has a folder for lost files.
                log.warning("an unusable file is not deleted", file=str(file), error=error.strerror)
        return key, [prompt for _, prompt in sorted(found, key=lambda pair: pair[0])]

    def _seal(self, prompt: KeptPrompt, state: BinaryIO) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - 6 MB of memory

        if shutil.disk_usage(self._folder).free - prompt.byte_count < MIN_FREE_BYTES:
            raise OSError(ENOSPC, "the disk is nearly full")
        file, cipher, nonce = self._file(prompt.name), AESGCM(self._key), secrets.token_bytes(_NONCE_BYTES)
        owner = prompt.partition
        header = _Header(
            prompt.identity,
            owner.tenant,
            owner.tag,
            owner.adapter,
            prompt.marks,
            prompt.byte_count,
            prompt.token_count,
            prompt.seconds,
            prompt.digests,
            prompt.kind,
        )
        pieces = chain([msgspec.json.encode(header)], iter(partial(state.read, PIECE_BYTES), b""))
        draft = file.with_suffix(_DRAFT_SUFFIX)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE), "wb") as written:
            written.write(nonce)
            for number, piece in enumerate(pieces):
                sealed = cipher.encrypt(nonce + _count(number), piece, prompt.name.encode())
                written.write(_count(len(sealed)) + sealed)
        draft.replace(file)

    def _unseal(self, file: Path, target: Path) -> None:
        pieces = _pieces(self._key, file)
        header = msgspec.json.decode(next(pieces), type=_Header)
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE), "wb") as written:
            byte_count = sum(written.write(piece) for piece in pieces)
        if byte_count != header.byte_count:
            raise DamagedPromptError
        os.utime(file)


def _prompt_in(key: bytes, file: Path) -> KeptPrompt | None:
    """Returns the prompt in a file; None: the file is damaged or cannot be read."""
    try:
        header = msgspec.json.decode(next(_pieces(key, file)), type=_Header)
    except (DamagedPromptError, OSError, msgspec.DecodeError):
        return None
    return KeptPrompt(
        name=file.stem,
        identity=header.identity,
        partition=Partition(header.tenant, header.tag, header.adapter),
        marks=header.marks,
        byte_count=header.byte_count,
        token_count=header.token_count,
        seconds=header.seconds,
        digests=header.digests,
        kind=header.kind,
    )


def _pieces(key: bytes, file: Path) -> Iterator[bytes]:
    """Yields the decrypted pieces of a file, the header first. Raises DamagedPromptError and OSError."""
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as in `_seal`
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

    cipher = AESGCM(key)
    with file.open("rb") as opened:
        nonce, number = opened.read(_NONCE_BYTES), 0
        while (size := opened.read(_COUNT_BYTES)) or number == 0:
            try:
                sealed = opened.read(min(int.from_bytes(size, "big"), 2 * PIECE_BYTES))
                piece = cipher.decrypt(nonce + _count(number), sealed, file.stem.encode())
            except (InvalidTag, ValueError) as error:
                raise DamagedPromptError from error
            yield piece
            number += 1


def _count(number: int) -> bytes:
    return number.to_bytes(_COUNT_BYTES, "big")


def _key_in(file: Path) -> bytes:
    """Returns the key in a file, which it creates if there is none."""
    if file.is_file() and len(key := file.read_bytes()) == KEY_BYTES:
        return key
    # Files of a lost key cannot be read and are deleted.
    key = secrets.token_bytes(KEY_BYTES)
    replace_file(file, key)
    return key
