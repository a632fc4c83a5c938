"""docs/clients.md: which clients were run against weft, what was tried, how it went, and how to point each at weft."""

import re
from collections.abc import Mapping

from client_catalogue import CLIENTS, PATHS, Client
from client_environments import FOLDER, ROOT

PAGE = ROOT / "docs" / "clients.md"
WELL = "well"

_TEXT = FOLDER / "page.md"
"""The page without its table and its sections."""


def render(results: Mapping[str, str]) -> str:
    """The page; `results` has for each client WELL, or what went wrong."""
    rows = "".join(_row(client, results[client.name]) for client in CLIENTS)
    sections = "".join(map(_section, CLIENTS))
    return _TEXT.read_text().replace("{rows}\n", rows).replace("{sections}\n", sections).rstrip() + "\n"


def results_of(page: str) -> dict[str, str]:
    """The results that a page tells of, by client."""
    by_anchor = {_anchor(client): client.name for client in CLIENTS}
    rows = re.findall(r"^\| \[[^]]+\]\(#([^)]+)\) \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    return {by_anchor[anchor]: result for anchor, result in rows if anchor in by_anchor}


def _row(client: Client, result: str) -> str:
    title = f"[{client.title}](#{_anchor(client)})"
    keys = ", ".join(client.keys)
    tried, real = _by_surface(client.features), _by_surface(client.real)
    return f"| {title} | {client.package} {client.version} | {tried} | {keys} | {real} | {result} |\n"


def _by_surface(features: tuple[str, ...]) -> str:
    names: dict[str, list[str]] = {}
    for feature in features:
        surface, _, name = feature.partition(".")
        names.setdefault(surface, []).append(name.replace("_", " "))
    return "<br>".join(f"`{PATHS[surface]}` {', '.join(of)}" for surface, of in names.items()) or "-"


def _section(client: Client) -> str:
    return f"### {client.title}\n\n{(FOLDER / client.name / 'usage.md').read_text()}\n"


def _anchor(client: Client) -> str:
    """As GitHub makes it of the heading."""
    return re.sub(r"[^\w\- ]", "", client.title.lower()).replace(" ", "-")
