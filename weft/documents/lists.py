"""Several resources as one JSON document: `{kind: "ModelList", items: [...]}`."""

from typing import Literal

from weft.documents.document_base import DocumentPart
from weft.documents.documents import AgentDocument, EventDocument, ModelDocument, PoolDocument, RunnerDocument
from weft.documents.route_document import RouteDocument


class _Page(DocumentPart):
    next_page_token: str | None = None
    """Over HTTP: asks for the page after this one; empty on the last."""


class ModelList(_Page):
    """Models by name."""

    kind: Literal["ModelList"]
    """What it is."""
    items: tuple[ModelDocument, ...]
    """The models."""


class AgentList(_Page):
    """Agents by name."""

    kind: Literal["AgentList"]
    """What it is."""
    items: tuple[AgentDocument, ...]
    """The agents."""


class RunnerList(_Page):
    """Runners by name."""

    kind: Literal["RunnerList"]
    """What it is."""
    items: tuple[RunnerDocument, ...]
    """The runners."""


class PoolList(_Page):
    """Pools by name."""

    kind: Literal["PoolList"]
    """What it is."""
    items: tuple[PoolDocument, ...]
    """The pools."""


class RouteList(_Page):
    """Routes by name."""

    kind: Literal["RouteList"]
    """What it is."""
    items: tuple[RouteDocument, ...]
    """The routes."""


class EventList(DocumentPart):
    """Events, oldest first."""

    kind: Literal["EventList"]
    """What it is."""
    items: tuple[EventDocument, ...]
    """The events."""
