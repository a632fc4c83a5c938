"""Whether a database is the one that promises were made with, and has all of them. Values only."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """How far a database had come when the last of its transactions was acknowledged."""

    store_id: str
    """Made with the database, at random."""
    commits: int
    """Transactions with changes, counted in the database itself."""


class LossKind(StrEnum):
    """What is wrong with a database."""

    OLDER = "older"
    """It lacks its last transactions: a write-ahead log was damaged or deleted, or an earlier copy was put back."""
    REPLACED = "replaced"
    """It is another one: it was deleted, emptied, or taken from another home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Transactions that were acknowledged, and that the database does not have."""

    kind: LossKind
    promised: Promise
    found: Promise

    @property
    def missing_commits(self) -> int:
        """How many; of another database none can be expected."""
        return self.promised.commits - (self.found.commits if self.kind is LossKind.OLDER else 0)

    @property
    def words(self) -> str:
        """For people."""
        if self.kind is LossKind.REPLACED:
            return (
                "the router's database is another one than that in which "
                f"{self.missing_commits} transactions were acknowledged"
            )
        return (
            f"the router's database is older than what was acknowledged with it: its last {self.missing_commits} "
            "transactions are missing"
        )


def loss_in(found: Promise, promised: Promise | None) -> Loss | None:
    """What a database lacks of what was promised; None: nothing, or nobody knows what was promised.

    A database that is ahead of the promise is in order: its transaction was on disk, and was not acknowledged yet.
    """
    if promised is None or promised.commits == 0:
        return None
    if promised.store_id != found.store_id:
        return Loss(kind=LossKind.REPLACED, promised=promised, found=found)
    if found.commits < promised.commits:
        return Loss(kind=LossKind.OLDER, promised=promised, found=found)
    return None
