"""Reads the files of the workbench page and prepares them for sending: hashed, compressed, with a security policy.

The files in `page/` are served without a build step, and those of extensions' pages with them: the table of pages gets
a row for each. All but `index.html` are under `/ui/<version>/`, where the version is the digest of all files, so that
browsers may cache them indefinitely. The page links them relative to its own path, because a proxy may publish the mesh
under a path that the gateway does not know.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from weft.extension import PageHook
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.gateway")

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
ASSETS = "/ui/assets/"
"""Placeholder in `index.html` for the folder of the other files."""
TABLE, ROWS = "app/page_table.js", "  // Pages of extensions\n"
"""The table of pages, and the line in it that the rows of extensions replace."""
VERSION_CHARS = 16
MAX_DEPTH = 16
"""Slashes in the path of a page below `/ui/`. The longest ones are names of models, such as `models/OWNER/NAME`."""
MIN_COMPRESSED_BYTES = 512
"""Smaller files fit into one network packet without compression."""
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
    ".LICENSE": "text/plain; charset=utf-8",
}
"""Content types by suffix; files with another suffix are not served."""
_INLINE_SCRIPT = re.compile(r"<script type=\"importmap\">(.*?)</script>", re.DOTALL)
_POLICY = (
    "default-src 'none'; script-src 'self' {hashes}; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' data: blob:; font-src 'self'; manifest-src 'self'; frame-src 'self'; base-uri 'none'; "
    "form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_FRAME_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
"""Of `diagram.html`: a frame without an origin, so inline styles and HTML from text there cannot reach the page."""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file to send."""

    body: bytes
    compressed: bytes | None
    """With gzip; None: too small to benefit."""
    content_type: str
    policy: str = ""
    """The Content-Security-Policy of the page, or of a frame in it."""


class PageFiles:
    """The files of the page, read at the first request."""

    def __init__(self, folder: Path = FOLDER, pages: Sequence[PageHook] = ()) -> None:
        """`pages`: those of extensions."""
        self._folder = folder
        self._pages = pages
        self.index = lru_cache(MAX_DEPTH + 1)(self._index)

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        found, rows = _files_in(self._folder), ""
        for page in self._pages:
            if files := _files_of(page):
                found |= files
                rows += _row(page)
            else:
                log.error("page of an extension has no files", page=page.path, package=page.package)
        if TABLE in found:
            found[TABLE] = found[TABLE].replace(ROWS.encode(), rows.encode())
        return found

    @cached_property
    def version(self) -> str:
        """Digest of all files."""
        digest = hashlib.sha256()
        for name, body in self._sources.items():
            digest.update(f"{name}\0{len(body)}\0".encode())
            digest.update(body)
        return digest.hexdigest()[:VERSION_CHARS]

    @cached_property
    def assets(self) -> dict[str, PageFile]:
        """All files but `index.html`, by path."""
        return {name: _page_file(name, body) for name, body in self._sources.items() if name != INDEX}

    def _index(self, depth: int) -> PageFile:
        """Returns the page for a path with that many slashes below `/ui/`, with relative links to its files.

        Its Content-Security-Policy allows the own files and, by digest, the inline import map.
        """
        folder = "../" * depth or "./"
        text = self._sources[INDEX].decode().replace(ASSETS, f"{folder}{self.version}/")
        digests = (hashlib.sha256(script.encode()).digest() for script in _INLINE_SCRIPT.findall(text))
        hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        return _page_file(INDEX, text.encode(), _POLICY.format(hashes=hashes))


def _files_in(folder: Path, place: str = "") -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in TYPES)
    return {f"{place}{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def _files_of(page: PageHook) -> dict[str, bytes]:
    """Returns the files of an extension's page; none if there is no such package."""
    with suppress(ImportError):
        spec = find_spec(page.package)
        if spec is not None and spec.submodule_search_locations:
            return _files_in(Path(spec.submodule_search_locations[0], "page"), f"app/extensions/{page.path}/")
    return {}


def _row(page: PageHook) -> str:
    """Returns the row of an extension's page in the table."""
    shown = {name: getattr(page, name) for name in ("path", "title", "group", "needs", "icon", "keys")}
    fields = ", ".join(f"{name}: {json.dumps(value)}" for name, value in shown.items())
    return f"  {{ {fields}, load: () => import({json.dumps(f'./extensions/{page.path}/{page.module}')}) }},\n"


def _page_file(name: str, body: bytes, policy: str = "") -> PageFile:
    # Without a timestamp, which would change the bytes.
    compressed = gzip.compress(body, mtime=0) if len(body) >= MIN_COMPRESSED_BYTES else None
    suffix = PurePosixPath(name).suffix
    return PageFile(body, compressed, TYPES[suffix], policy or (_FRAME_POLICY if suffix == ".html" else ""))
