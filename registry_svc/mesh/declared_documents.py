"""What operators declared, over what the configuration of the mesh has."""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from weft.documents.kind import DeclaredKind, Reference

Record = Any
"""A message of a declared kind, such as an Alias."""


class DeclaredDocuments:
    """The declared and the configured documents of one kind, by name. They are never changed, only replaced."""

    def __init__(self, kind: DeclaredKind) -> None:
        self._kind = kind
        self._declared: dict[str, Record] = {}
        self._configured: dict[str, Record] = {}
        self.shown: Mapping[str, Record] = self._declared
        """The documents that count: a configured one does not if one with its name or scope is declared. Another
        mapping after each change."""

    def __len__(self) -> int:
        """How many are declared."""
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        """Whether one of this name is declared."""
        return name in self._declared

    def declared(self, name: str) -> Record | None:
        """The declared document of this name."""
        return self._declared.get(name)

    def all_declared(self) -> list[Record]:
        """The declared documents, by name."""
        return [self._declared[name] for name in sorted(self._declared)]

    def same_scope(self, manifest: Any, besides: Container[str]) -> str:
        """The name of another declared document with the scope of this one; empty: there is none."""
        scope = self._kind.scope(manifest)
        found = (name for name in self._declared if name != manifest.name and name not in besides)
        return next((name for name in found if self._kind.scope(self._declared[name].manifest) == scope), "")

    def referring(self, is_meant: Callable[[Reference], bool]) -> set[str]:
        """The declared documents with a reference that is meant."""
        return {
            name
            for name, record in self._declared.items()
            if any(map(is_meant, self._kind.references_of(record.manifest)))
        }

    def configure(self, records: Iterable[Record]) -> None:
        """Set the documents of the configuration."""
        self._configured = {record.manifest.name: record for record in records}
        self._refresh()

    def replace(self, new: Iterable[Record], gone: Iterable[str]) -> None:
        """Put documents in place of earlier ones of their names, and remove others; unknown names are ignored."""
        removed = frozenset(gone)
        kept = {name: record for name, record in self._declared.items() if name not in removed}
        self._declared = kept | {record.manifest.name: record for record in new}
        self._refresh()

    def _refresh(self) -> None:
        if not self._configured:
            self.shown = self._declared
            return
        taken = {self._kind.scope(record.manifest) for record in self._declared.values()}
        below = {
            name: record
            for name, record in self._configured.items()
            if self._kind.scope(record.manifest) not in taken and name not in self._declared
        }
        self.shown = below | self._declared
