"""All pages of the workbench, as its own table has them: a page that is new is in every test of all pages."""

import re

from gateway_script import WORKBENCH

from gateway.workbench import page_files

TABLE = WORKBENCH.assets[page_files.TABLE].body.decode()
_ROW = re.compile(r'\{ path: "([^"]*)", title: "([^"]+)", group: "([^"]+)", needs: "([^"]+)"')

PAGES = {path: title for path, title, _, _ in _ROW.findall(TABLE)}
"""Titles by path."""
NEEDS = {path: needs for path, _, _, needs in _ROW.findall(TABLE)}
"""The right that each needs."""
WITH_MODELS = "models" if "models" in PAGES else ""
"""A page that names every model."""
