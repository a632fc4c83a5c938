"""A log file that is read while its writer continues: its older part, what is there, and what comes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

MAX_READ_BYTES = 256 * 1024 * 1024
"""Bytes that are read of the end of a file; what is before is left out."""
MAX_LINE_BYTES = 1024 * 1024
"""Length at which a line is divided."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One line of a file, or a part of one longer than MAX_LINE_BYTES."""

    data: bytes
    written: float
    """When the file was last written to, in seconds since the epoch."""


class LogFile:
    """A log file with what was moved to `<name>.1`; the file may be absent at first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def past(self) -> Iterator[Piece]:
        """Yields the lines of the older part and of the file up to now. A last one that is not complete is in it."""
        self._open()
        older = _opened(self.path.with_name(f"{self.path.name}.1"))
        if older is not None:
            with older:
                # Between the two openings the file may have become its older part.
                if self._file is None or not os.path.sameopenfile(older.fileno(), self._file.fileno()):
                    _skip_to_end_part(older)
                    yield from _lines(older)
        if self._file is not None:
            _skip_to_end_part(self._file)
            yield from _lines(self._file)

    def new(self) -> Iterator[Piece]:
        """Yields the complete lines since the last call, over a rotation of the file as well."""
        if self._file is None and not self._open():
            return
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            # `weft up -d` begins its file anew.
            self._file.seek(0)
            self._rest = b""
        yield from self._complete()
        if self._is_replaced():
            # The writer may have added lines until it moved the file.
            yield from self._complete()
            self._note_loss()
            self._close()
            if self._open():
                yield from self._complete()

    def take_lost(self) -> bool:
        """Whether lines were missed since the last call: the file was replaced twice between two looks."""
        lost, self._lost = self._lost, False
        return lost

    def _complete(self) -> Iterator[Piece]:
        assert self._file is not None
        for piece in _lines(self._file):
            self._rest += piece.data
            if self._rest.endswith(b"\n") or len(self._rest) >= MAX_LINE_BYTES:
                yield Piece(self._rest, piece.written)
                self._rest = b""

    def _is_replaced(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _note_loss(self) -> None:
        assert self._file is not None
        try:
            older = self.path.with_name(f"{self.path.name}.1").stat()
        except FileNotFoundError:
            return
        self._lost = not os.path.samestat(older, os.fstat(self._file.fileno()))

    def _open(self) -> bool:
        self._file = _opened(self.path)
        return self._file is not None

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(path: Path) -> IO[bytes] | None:
    try:
        return path.open("rb")
    except FileNotFoundError:
        return None


def _skip_to_end_part(file: IO[bytes]) -> None:
    size = os.fstat(file.fileno()).st_size
    if size > MAX_READ_BYTES:
        file.seek(size - MAX_READ_BYTES)
        file.readline(MAX_LINE_BYTES)


def _lines(file: IO[bytes]) -> Iterator[Piece]:
    """Yields the lines up to the end that the file has now."""
    status = os.fstat(file.fileno())
    while file.tell() < status.st_size and (line := file.readline(MAX_LINE_BYTES)):
        yield Piece(line, status.st_mtime)
