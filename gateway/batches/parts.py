"""What the routes of files and batches need besides."""

from dataclasses import dataclass

from gateway.batches.finishing import BatchFinisher, FinishingJobs
from gateway.batches.making import BatchMaker
from gateway.batches.room import Room
from gateway.parts import InferenceParts
from gateway.tasks.surface import Surfaces
from weft.durable.batches import BatchPort
from weft.durable.files import FilePort


@dataclass(frozen=True, slots=True, kw_only=True)
class FileParts:
    """Who keeps files, and how many are taken in at once."""

    port: FilePort
    uploads: Room


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """Who keeps batches, who makes them and has them finished, and how many are made at once."""

    port: BatchPort
    maker: BatchMaker
    finisher: BatchFinisher
    creations: Room


def file_parts(parts: InferenceParts, files: FilePort) -> FileParts:
    """Those of one gateway."""
    bounds = parts.config.batches
    return FileParts(port=files, uploads=Room(bounds.max_uploads, "files are taken in already (max_uploads)"))


def batch_parts(
    parts: InferenceParts, files: FilePort, batches: BatchPort, surfaces: Surfaces, jobs: FinishingJobs
) -> BatchParts:
    """Those of one gateway; `jobs` end with it."""
    bounds = parts.config.batches
    return BatchParts(
        port=batches,
        maker=BatchMaker(files, batches, surfaces, config=parts.config, clock=parts.clock),
        finisher=BatchFinisher(files, batches, surfaces, jobs=jobs, config=bounds),
        creations=Room(bounds.max_creations, "batches are being made already (max_creations)"),
    )
