"""Loss detection: compares a database with the promise file, which records its acknowledged commits. Values only."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCount:
    """The state of a database at its last acknowledged transaction."""

    store_id: str
    """Random id of the database."""
    commits: int
    """Transactions with changes, counted in the database."""


class LossKind(StrEnum):
    """The kind of a loss."""

    OLDER = "older"
    """The last transactions are missing: a write-ahead log was damaged or deleted, or an older copy was restored."""
    REPLACED = "replaced"
    """It is another database: the file was deleted, emptied, or copied from another installation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Acknowledged transactions that the database lacks."""

    kind: LossKind
    promised: CommitCount
    found: CommitCount

    @property
    def missing_commits(self) -> int:
        """The number of missing transactions; all of them in another database."""
        return self.promised.commits - (self.found.commits if self.kind is LossKind.OLDER else 0)

    @property
    def message(self) -> str:
        """The message for users and operators."""
        if self.kind is LossKind.REPLACED:
            return (
                "the router's database is another one than that in which "
                f"{self.missing_commits} transactions were acknowledged"
            )
        return (
            f"the router's database is older than what was acknowledged with it: its last {self.missing_commits} "
            "transactions are missing"
        )


def loss_in(found: CommitCount, promised: CommitCount | None) -> Loss | None:
    """Returns the loss of a database compared with its promise; None: no loss, or no promise is known.

    A database may be ahead of the promise: its last transaction was on disk but not yet acknowledged.
    """
    if promised is None or promised.commits == 0:
        return None
    if promised.store_id != found.store_id:
        return Loss(kind=LossKind.REPLACED, promised=promised, found=found)
    if found.commits < promised.commits:
        return Loss(kind=LossKind.OLDER, promised=promised, found=found)
    return None
