"""Writes the reference: `python -m reference_pages FOLDER`."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.endpoints import docs_table
from gateway.runner_api_service import runner_routers
from reference_pages import commands, errors, field_tables, log_events, metrics, parameters, presets, settings
from weft.documents.schemas import schemas
from weft.extension import own_extensions
from weft_app.config.schema import schema_text

_ENDPOINTS_HEAD = """# Endpoints

[The API page](../api.md) describes requests and answers; the OpenAPI document is at `/openapi.json`.

"""

PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "configuration.md": settings.page,
    "document-fields.md": field_tables.page,
    "endpoints.md": lambda: _ENDPOINTS_HEAD + docs_table(own_extensions(), runner_routers(own_extensions())),
    "errors.md": errors.page,
    "log-events.md": log_events.page,
    "metrics.md": metrics.page,
    "parameters.md": parameters.page,
    "presets.md": presets.page,
    "config.schema.json": schema_text,
}
"""The files of the reference by name."""


def write(folder: Path) -> None:
    """Writes every page, and the JSON schemas of resources and events."""
    (folder / "schemas").mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make(), "utf-8")
    for name, schema in schemas().items():
        (folder / "schemas" / name).write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
