"""All pages of the workbench, as its own table has them: a page that is new is in every test of all pages."""

import re
from pathlib import Path

TABLE = Path(__file__).parents[2] / "gateway" / "workbench" / "page" / "app" / "page_table.js"
_ROW = re.compile(r'\{ path: "([^"]*)", title: "([^"]+)", group: "([^"]+)", needs: "([^"]+)"')

PAGES = {path: title for path, title, _, _ in _ROW.findall(TABLE.read_text())}
"""Titles by path."""
NEEDS = {path: needs for path, _, _, needs in _ROW.findall(TABLE.read_text())}
"""The right that each needs."""
WITH_MODELS = "models" if "models" in PAGES else ""
"""A page that names every model."""
