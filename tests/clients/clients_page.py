"""docs/clients.md: how to configure each client, and the versions and APIs that were tested."""

import re
from collections.abc import Mapping

from client_catalogue import CLIENTS, PATHS, Client
from client_environments import FOLDER, ROOT

PAGE = ROOT / "docs" / "clients.md"
WELL = "passed"

_TEXT = FOLDER / "page.md"
"""The page without its table and its sections."""


def render(results: Mapping[str, str]) -> str:
    """Returns the page; `results` has WELL for each client, or what failed."""
    rows = "".join(_row(client, results[client.name]) for client in CLIENTS)
    sections = "".join(map(_section, CLIENTS))
    return _TEXT.read_text().replace("{rows}\n", rows).replace("{sections}\n", sections).rstrip() + "\n"


def results_of(page: str) -> dict[str, str]:
    """Returns the results on a page, by client."""
    by_anchor = {_anchor(client): client.name for client in CLIENTS}
    rows = re.findall(r"^\| \[[^]]+\]\(#([^)]+)\) \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    return {by_anchor[anchor]: result for anchor, result in rows if anchor in by_anchor}


def _row(client: Client, result: str) -> str:
    title = f"[{client.title}](#{_anchor(client)})"
    paths = ", ".join(f"`{PATHS[surface]}`" for surface in client.surfaces)
    return f"| {title} | {client.package} {client.version} | {paths} | {result} |\n"


def _section(client: Client) -> str:
    return f"## {client.title}\n\n{(FOLDER / client.name / 'usage.md').read_text()}\n"


def _anchor(client: Client) -> str:
    """As GitHub makes it of the heading."""
    return re.sub(r"[^\w\- ]", "", client.title.lower()).replace(" ", "-")
