"""What the routes of files and batches need besides."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.batches.finishing import BatchFinisher, FinishingJobs
from gateway.batches.making import BatchMaker
from gateway.deps import InferenceParts
from gateway.tasks.surface import Surfaces
from weft.durable.batches import BatchPort
from weft.durable.files import FilePort
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class Room:
    """Places, of which each is held for as long as a block runs."""

    def __init__(self, size: int, what: str) -> None:
        """`what` names the setting and the things, such as "files are taken in at once (max_uploads)"."""
        self._size = size
        self._what = what
        self._taken = 0

    @contextmanager
    def one(self) -> Generator[None]:
        """Hold a place. Raises RATE_LIMIT_EXCEEDED where there is none."""
        if self._taken >= self._size:
            message = f"{self._taken} {self._what}; try again"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_seconds=1)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """Who keeps files, and how many are taken in at once."""

    parts: InferenceParts
    port: FilePort
    uploads: Room

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.parts.config.batches.store_timeout_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """Who keeps batches, who makes them and has them finished, and how many are made at once."""

    parts: InferenceParts
    port: BatchPort
    maker: BatchMaker
    finisher: BatchFinisher
    creations: Room

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.parts.config.batches.store_timeout_seconds


def file_parts(parts: InferenceParts, files: FilePort) -> FileParts:
    """Those of one gateway."""
    bounds = parts.config.batches
    return FileParts(
        parts=parts, port=files, uploads=Room(bounds.max_uploads, "files are taken in already (max_uploads)")
    )


def batch_parts(
    parts: InferenceParts, files: FilePort, batches: BatchPort, surfaces: Surfaces, jobs: FinishingJobs
) -> BatchParts:
    """Those of one gateway; `jobs` end with it."""
    bounds = parts.config.batches
    return BatchParts(
        parts=parts,
        port=batches,
        maker=BatchMaker(files, batches, surfaces, config=parts.config, clock=parts.clock),
        finisher=BatchFinisher(files, batches, surfaces, jobs=jobs, config=bounds),
        creations=Room(bounds.max_creations, "batches are being made already (max_creations)"),
    )
