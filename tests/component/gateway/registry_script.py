"""A registry that answers the gateway by script."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime

from kit.steps import done

from gateway.registry_client import NO_AUTHOR, Author, Names, RegistryClient, ResourcePage
from weft.api.registry.v1 import journal_pb2
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.event_pb2 import Event, EventReason
from weft.api.registry.v1.pool_pb2 import Pool
from weft.api.registry.v1.registry_service_pb2 import (
    ListEventsRequest,
    ListEventsResponse,
    WatchEventsRequest,
    WatchResponse,
)
from weft.api.registry.v1.settings_pb2 import MeshSettings
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, ModelDocument, to_declaration
from weft.documents.yaml_documents import parse_document
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Step = Event | Exception | asyncio.Event


def document(kind: str, name: str, **fields: object) -> AnyDocument:
    return parse_document({"kind": kind, "name": name, **fields})


def model_row(name: str, **fields: object) -> ModelDocument:
    found = document("model", name, **fields)
    assert isinstance(found, ModelDocument)
    return found


def event(sequence: int, reason: str = "registered") -> Event:
    found = Event(
        sequence=sequence,
        kind="model",
        name="tiny",
        reason=EventReason.Value(f"EVENT_REASON_{reason.upper()}"),
        message="titan publishes it",
    )
    found.time.FromDatetime(datetime(2026, 11, 20, 8, 0, sequence, tzinfo=UTC))
    return found


def some_resources() -> list[AnyDocument]:
    return [
        model_row("tiny", poolName="chat", runner="titan"),
        model_row("small", poolName="chat"),
        document("agent", "coder", model="tiny", systemPrompt="Be terse.", defaultParams={"temperature": 0.2}),
        document("runner", "titan"),
        document("pool", "chat", members=["small", "tiny"]),
        document("route", "summaries", candidates=["tiny", "small"], budgetSeconds=60, keepAlive="5m"),
    ]


@dataclass
class ScriptedRegistry(RegistryClient):
    """Has `documents`; every call raises `failure`, once it is set. Records the calls."""

    documents: list[AnyDocument] = field(default_factory=some_resources)
    events: list[Event] = field(default_factory=lambda: [event(1), event(2)])
    watch_steps: list[Step] = field(default_factory=list)
    """What a watch of events does."""
    resources: list[WatchResponse | Exception | asyncio.Event] = field(default_factory=list)
    """What the first watch of resources does."""
    resources_again: list[WatchResponse | Exception | asyncio.Event] = field(default_factory=list)
    """What every later watch of resources does."""
    watches: int = 0
    """Watches of resources that were opened."""
    watches_closed: int = 0
    allow_cloud_fallback: bool = True
    journal: journal_pb2.JournalMode.ValueType = journal_pb2.JOURNAL_MODE_UNSPECIFIED
    failure: WeftError | None = None
    asked: list[tuple[object, ...]] = field(default_factory=list)
    authors: list[Author] = field(default_factory=list)
    """Who declared, of each apply."""
    was_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def list_page(
        self, kind: ResourceKind, page_size: int, page_token: str, labels: str = "", names: Names = None
    ) -> ResourcePage:
        self._note(
            "list", kind, page_size, page_token, *([labels] if labels else []), *([names] if names is not None else [])
        )
        found = [entry for entry in self.documents if entry.kind is kind and entry.name > page_token]
        found.sort(key=lambda entry: entry.name)
        page = found[: page_size or len(found)]
        return ResourcePage(documents=page, next_page_token=page[-1].name if len(page) < len(found) else "")

    async def get(self, kind: ResourceKind, name: str) -> AnyDocument:
        self._note("get", kind, name)
        for entry in self.documents:
            if (entry.kind, entry.name) == (kind, name):
                return entry
        raise WeftError(Reason.NOT_FOUND, f"no {kind.value} is called {name}")

    async def members(self, model: str) -> tuple[Pool, Sequence[ModelDocument]]:
        self._note("members", model)
        rows = [entry for entry in self.documents if isinstance(entry, ModelDocument)]
        return Pool(name="chat", explicit=True, size=len(rows), active_count=1), rows

    async def list_events(self, wanted: ListEventsRequest) -> ListEventsResponse:
        self._note("events", wanted)
        return ListEventsResponse(events=self.events)

    async def watch(self) -> AsyncGenerator[WatchResponse]:
        self._note("watch resources")
        self.watches += 1
        try:
            async for step in done(self.resources if self.watches == 1 else self.resources_again):
                yield step
        finally:
            self.watches_closed += 1

    async def follow_events(self, past: int) -> AsyncGenerator[Event | None]:
        for event in self.events[-past:]:
            yield event
        yield None
        async with aclosing(self.watch_events(WatchEventsRequest())) as coming:
            async for event in coming:
                yield event

    async def watch_events(self, wanted: WatchEventsRequest) -> AsyncGenerator[Event]:
        self._note("watch", wanted)
        try:
            async for step in done(self.watch_steps):
                yield step
        finally:
            self.was_closed.set()

    async def apply(
        self,
        documents: Sequence[AnyDocument],
        *,
        dry_run: bool,
        adopt: bool,
        author: Author = NO_AUTHOR,
        expected: Sequence[AnyDocument] = (),
    ) -> Sequence[ApplyResult]:
        del expected
        self.authors.append(author)
        self._note("apply", [f"{entry.kind}/{entry.name}" for entry in documents], dry_run, adopt)
        return [self._applied(entry) for entry in documents]

    async def delete(self, kind: ResourceKind, name: str, *, force: bool, requested_by: str) -> None:
        self._note("delete", kind, name, *(["force"] if force else []))

    async def settings(self) -> MeshSettings:
        self._note("settings")
        return self._settings()

    def _settings(self) -> MeshSettings:
        return MeshSettings(allow_cloud_fallback=self.allow_cloud_fallback, journal=self.journal)

    async def update_settings(self, settings: MeshSettings) -> MeshSettings:
        self._note("update settings", settings)
        self.allow_cloud_fallback = settings.allow_cloud_fallback
        self.journal = settings.journal or self.journal
        return self._settings()

    def _note(self, *what: object) -> None:
        self.asked.append(what)
        if self.failure is not None:
            raise self.failure

    def _applied(self, wanted: AnyDocument) -> ApplyResult:
        before = next((entry for entry in self.documents if entry.name == wanted.name), None)
        outcome = "CREATED" if before is None else "UNCHANGED" if before == wanted else "CONFIGURED"
        return ApplyResult(
            kind=wanted.kind,
            name=wanted.name,
            outcome=ApplyResult.Outcome.Value(f"OUTCOME_{outcome}"),
            before=None if before is None else to_declaration(before),
            after=to_declaration(wanted),
        )
