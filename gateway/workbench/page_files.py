"""Reads the files of the workbench page and prepares them for sending: hashed, compressed, with a security policy.

The files in `page/` are served without a build step. All but `index.html` are under `/ui/<version>/`, where the version
is the digest of all files, so that browsers may cache them indefinitely. The page links them relative to its own path,
because a proxy may publish the mesh under a path that the gateway does not know.
"""

import base64
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
ASSETS = "/ui/assets/"
"""Placeholder in `index.html` for the folder of the other files."""
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

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self.index = lru_cache(MAX_DEPTH + 1)(self._index)

    @cached_property
    def _sources(self) -> dict[str, bytes]:
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file() and path.suffix in TYPES)
        return {path.relative_to(self._folder).as_posix(): path.read_bytes() for path in paths}

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


def _page_file(name: str, body: bytes, policy: str = "") -> PageFile:
    # Without a timestamp, which would change the bytes.
    compressed = gzip.compress(body, mtime=0) if len(body) >= MIN_COMPRESSED_BYTES else None
    suffix = PurePosixPath(name).suffix
    return PageFile(body, compressed, TYPES[suffix], policy or (_FRAME_POLICY if suffix == ".html" else ""))
