"""Collaborators of the endpoints of files and batches."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.batches.finishing import BatchFinisher, FinishingJobs
from gateway.batches.making import BatchMaker
from gateway.deps import InferenceDeps
from gateway.tasks.task_apis import TaskApis
from weft.durable.batches import BatchPort, FilePort
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class ConcurrencyLimit:
    """A limit on how many blocks run at once."""

    def __init__(self, size: int, what: str) -> None:
        """`what` names the setting and the things, such as "files are taken in at once (max_uploads)"."""
        self._size = size
        self._what = what
        self._taken = 0

    @contextmanager
    def slot(self) -> Generator[None]:
        """Hold one of the slots. Raises RATE_LIMIT_EXCEEDED where all are taken."""
        if self._taken >= self._size:
            message = f"{self._taken} {self._what}; try again"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message, retry_after_seconds=1)
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDeps:
    """The file store, and the limit of concurrent uploads."""

    deps: InferenceDeps
    port: FilePort
    uploads: ConcurrencyLimit

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.deps.config.batches.store_timeout_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDeps:
    """The batch store, creation and finishing of batches, and the limit of concurrent creations."""

    deps: InferenceDeps
    port: BatchPort
    maker: BatchMaker
    finisher: BatchFinisher
    creations: ConcurrencyLimit

    @property
    def timeout_seconds(self) -> float:
        """How long the store may take to answer."""
        return self.deps.config.batches.store_timeout_seconds


def file_deps(deps: InferenceDeps, files: FilePort) -> FileDeps:
    """Returns the collaborators of the file endpoints of one gateway."""
    bounds = deps.config.batches
    return FileDeps(
        deps=deps, port=files, uploads=ConcurrencyLimit(bounds.max_uploads, "files are taken in already (max_uploads)")
    )


def batch_deps(
    deps: InferenceDeps, files: FilePort, batches: BatchPort, task_apis: TaskApis, jobs: FinishingJobs
) -> BatchDeps:
    """Returns the collaborators of the batch endpoints of one gateway; `jobs` end with it."""
    bounds = deps.config.batches
    return BatchDeps(
        deps=deps,
        port=batches,
        maker=BatchMaker(files, batches, task_apis, config=deps.config, clock=deps.clock),
        finisher=BatchFinisher(files, batches, task_apis, jobs=jobs, config=bounds),
        creations=ConcurrencyLimit(bounds.max_creations, "batches are being made already (max_creations)"),
    )
