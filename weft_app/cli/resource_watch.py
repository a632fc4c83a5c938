"""Resources of one kind or several, followed by the registry's watch."""

from pathlib import Path
from typing import Any

from weft.documents.kinds import Key
from weft.documents.mesh_state import MeshState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_of, plain
from weft.documents.selectors import Selector
from weft.kernel.unknown_names import unknown_name
from weft_app.cli.columns import labelled_listing, listing_of
from weft_app.cli.follow import follow_resources
from weft_app.cli.mesh_documents import Document
from weft_app.cli.options import ResourceFormat
from weft_app.cli.output import Feed, json_line, say
from weft_app.cli.targets import Scope, selected


class ResourceWatch:
    """Prints resources, then each one that changes."""

    def __init__(self, scope: Scope, output: ResourceFormat, selector: Selector = ()) -> None:
        self._kinds = scope.kinds
        self._selector = selector
        self._wanted = frozenset((target.kind, target.name) for target in scope.targets)
        self._output = output
        listing = listing_of if len(scope.kinds) == 1 else labelled_listing
        self._feeds = {kind: Feed(listing(kind), output) for kind in scope.kinds}
        self._headed: set[ResourceKind] = set()
        """Kinds whose header is printed."""
        self._shown: dict[Key, Any] = {}

    def run(self, home: Path) -> None:
        """Prints until Ctrl-C."""
        following = follow_resources(home)
        state, _ = next(following)
        self._begin(state)
        for state, changed in following:
            self.show(state, changed)

    def _begin(self, state: MeshState) -> None:
        named = {key: document for key in self._wanted if (document := state.document(key)) is not None}
        missing = self._wanted - named.keys()
        if missing:
            kind, name = min(missing)
            raise unknown_name(kind.value, name, (document.name for document in state.documents(kind)))
        # Ids are names from here on.
        self._wanted = frozenset((kind, document.name) for (kind, _), document in named.items())
        for kind in self._kinds:
            wanted = [plain(each) for each in state.documents(kind) if self._is_wanted((kind, each.name))]
            documents = selected(wanted, self._selector)
            self._shown.update(((kind, each["name"]), self._fingerprint(kind, each)) for each in documents)
            # Beside other kinds, one without resources gets its header with its first.
            if documents or len(self._kinds) == 1:
                self._headed.add(kind)
                say(self._feeds[kind].first(documents))

    def show(self, state: MeshState, changed: frozenset[Key]) -> None:
        """Prints those of `changed` whose row differs from the last one printed."""
        for key in sorted(key for key in changed if key[0] in self._feeds and self._is_wanted(key)):
            found = state.document(key)
            document = None if found is None else plain(found)
            if document is None or not selected([document], self._selector):
                if self._shown.pop(key, None) is not None:
                    say(self._farewell(*key))
                continue
            fingerprint = self._fingerprint(key[0], document)
            if self._shown.get(key) != fingerprint:
                self._shown[key] = fingerprint
                say(self._row(key[0], document))

    def _row(self, kind: ResourceKind, document: Document) -> str:
        feed = self._feeds[kind]
        if kind in self._headed:
            return feed.row(document)
        self._headed.add(kind)
        return feed.first([document])

    def _is_wanted(self, key: Key) -> bool:
        return not self._wanted or key in self._wanted

    def _fingerprint(self, kind: ResourceKind, document: Document) -> Any:
        match self._output:
            case ResourceFormat.JSON | ResourceFormat.NAME:
                status = {name: value for name, value in document["status"].items() if name != "lastHeartbeatAt"}
                return document | {"status": status}
            case ResourceFormat.YAML:
                return declared_of(document)
            case _:
                return self._feeds[kind].table.fingerprint(document)

    def _farewell(self, kind: ResourceKind, name: str) -> str:
        match self._output:
            case ResourceFormat.JSON:
                return json_line({"kind": kind.value, "name": name, "deleted": True})
            case ResourceFormat.YAML:
                return f"# {kind.value}/{name} is deleted\n"
            case ResourceFormat.NAME:
                return f"{kind.value}/{name}\n"
            case _:
                table = self._feeds[kind].table
                titles = table.titles
                told_in = titles.index("STATUS") if "STATUS" in titles else 1
                cells = ("deleted" if place == told_in else "-" for place in range(1, len(titles)))
                return table.line([name if len(self._kinds) == 1 else f"{kind.value}/{name}", *cells])
