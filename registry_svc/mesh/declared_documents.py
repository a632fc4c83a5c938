"""Declared documents, which override configured ones."""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from weft.documents.kind import DeclaredKind, Reference

Record = Any
"""A message of a declared kind, such as an Alias."""


class DeclaredDocuments:
    """The declared and configured documents of one kind, by name. Documents are immutable, but can be replaced."""

    def __init__(self, kind: DeclaredKind) -> None:
        self._kind = kind
        self._declared: dict[str, Record] = {}
        self._configured: dict[str, Record] = {}
        self.shown: Mapping[str, Record] = self._declared
        """The effective documents: declared ones, and configured ones unless a declared one has the same name or scope.
        A new mapping after each change."""

    def __len__(self) -> int:
        """Returns the number of declared documents."""
        return len(self._declared)

    def __contains__(self, name: object) -> bool:
        """Whether a document with this name is declared."""
        return name in self._declared

    def declared(self, name: str) -> Record | None:
        """Returns the declared document with this name, or None."""
        return self._declared.get(name)

    def all_declared(self) -> list[Record]:
        """Returns the declared documents, sorted by name."""
        return [self._declared[name] for name in sorted(self._declared)]

    def same_scope(self, manifest: Any, besides: Container[str]) -> str:
        """Returns the name of another declared document with the same scope, or ""."""
        scope = self._kind.scope(manifest)
        found = (name for name in self._declared if name != manifest.name and name not in besides)
        return next((name for name in found if self._kind.scope(self._declared[name].manifest) == scope), "")

    def referring(self, is_meant: Callable[[Reference], bool]) -> set[str]:
        """Returns the names of declared documents with a reference for which `is_meant` is true."""
        return {
            name
            for name, record in self._declared.items()
            if any(map(is_meant, self._kind.references_of(record.manifest)))
        }

    def configure(self, records: Iterable[Record]) -> None:
        """Replaces the documents of the configuration."""
        self._configured = {record.manifest.name: record for record in records}
        self._refresh()

    def replace(self, new: Iterable[Record], gone: Iterable[str]) -> None:
        """Adds or replaces documents by name, and removes others. Ignores unknown names."""
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
