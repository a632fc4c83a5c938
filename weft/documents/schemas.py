"""The published JSON schemas: python -m weft.documents.schemas docs/schemas writes them; a test compares the two."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.documents.document_base import DocumentPart
from weft.documents.documents import (
    AgentDocument,
    EventDocument,
    ModelDocument,
    PoolDocument,
    RouteDocument,
    RunnerDocument,
)

if TYPE_CHECKING:
    from pydantic import BaseModel


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


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, dict[str, Any]]:
    """Every schema by its file name. They hold for what `apply` takes and for what `-o json` prints."""
    published: dict[str, type[BaseModel]] = {
        "model": ModelDocument,
        "agent": AgentDocument,
        "runner": RunnerDocument,
        "pool": PoolDocument,
        "route": RouteDocument,
        "event": EventDocument,
        "model-list": ModelList,
        "agent-list": AgentList,
        "runner-list": RunnerList,
        "pool-list": PoolList,
        "route-list": RouteList,
        "event-list": EventList,
    }
    return {
        f"{name}.json": {"$schema": _DIALECT, **document.model_json_schema(by_alias=True)}
        for name, document in published.items()
    }


def write(folder: Path) -> None:
    """Write every schema into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_text(text_of(schema), "utf-8")


def text_of(schema: dict[str, Any]) -> str:
    """A schema as its file has it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schemas"))
