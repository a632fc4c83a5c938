"""A local hub of models that speaks the Hugging Face hub's protocol, and fails on demand.

It serves what huggingface_hub and other clients request: a search, a model's revisions with sizes and digests, its tree
in pages, HEAD and GET of `/OWNER/REPO/resolve/REVISION/FILE` with X-Repo-Commit, X-Linked-Etag and X-Linked-Size,
ranges, redirects of large files to another origin, and 401, 403 and 404 with X-Error-Code. It is also a program:

    python -m weft_testing.model_hub FOLDER [--port N] [--bytes-per-second N]

serves each FOLDER/OWNER/REPO, and prints its address as the first line.
"""

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from typing_extensions import override

LFS_SUFFIXES = (".gguf", ".safetensors", ".bin")
"""Files that the hub stores outside git: their ETag is their SHA-256, and another origin serves them."""
TREE_PAGE = 50
CHUNK_BYTES = 16_384
CDN_PREFIX = "/cdn/"


@dataclass(slots=True, kw_only=True)
class HubRepository:
    """One repository of the hub."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False
    """Whether only readers with a token in `tokens` get its files."""
    private: bool = False
    """Whether other readers get "not found"."""
    context_tokens: int = 0
    """Training context of its GGUF files; 0: none."""
    downloads: int = 0
    lies: dict[str, bytes] = field(default_factory=dict)
    """Content that replaces a file's own."""

    @property
    def commit(self) -> str:
        """Its commit, which depends on its files."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(self.files.items()):
            digest.update(path.encode() + hashlib.sha256(content).digest())
        return digest.hexdigest()


@dataclass(slots=True, kw_only=True)
class HubFaults:
    """Faults, which may be changed while the hub runs."""

    cut_after_bytes: list[int] = field(default_factory=list)
    """Bytes of content after which the connection is closed, one entry per answer."""
    statuses: list[int] = field(default_factory=list)
    """Statuses that replace the next answers with content."""
    chunk_seconds: float = 0.0
    """Pause before each chunk of content."""
    ignores_ranges: bool = False
    drops_lengths: bool = False
    redirects: int = 1
    """Number of redirects of a large file before its content."""
    redirect_to: str = ""
    """Target of these redirects instead of this hub's other origin."""
    sends_no_etag: bool = False


@dataclass(slots=True, kw_only=True)
class HubRequest:
    """A received request; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


class ModelHub:
    """A hub with repositories in memory, and files at plain URLs: `/files/NAME`."""

    def __init__(self, *, port: int = 0) -> None:
        self.repositories: dict[str, HubRepository] = {}
        self.files: dict[str, bytes] = {}
        """Files outside repositories."""
        self.tokens: set[str] = set()
        self.faults = HubFaults()
        self.requests: list[HubRequest] = []
        self.sent_bytes = 0
        """Total sent bytes of content."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Its address, as for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def cdn_url(self) -> str:
        """The address of its other origin, which rejects tokens."""
        return f"http://localhost:{self._server.server_port}{CDN_PREFIX}"

    @contextmanager
    def running(self) -> Iterator["ModelHub"]:
        """Serves during the block."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def requested(self, method: str, part: str) -> list[HubRequest]:
        """Returns the requests with a method whose path contains `part`."""
        return [request for request in self.requests if request.method == method and part in request.path]

    def take_cut(self) -> int | None:
        """Returns the number of bytes after which to cut the current answer; None: do not cut it."""
        with self._lock:
            return self.faults.cut_after_bytes.pop(0) if self.faults.cut_after_bytes else None

    def take_status(self) -> int | None:
        """Returns the status that replaces the current answer; None: none."""
        with self._lock:
            return self.faults.statuses.pop(0) if self.faults.statuses else None

    def note_sent(self, count: int) -> None:
        """Counts content that was sent."""
        with self._lock:
            self.sent_bytes += count

    def note_request(self, request: HubRequest) -> None:
        """Records a request."""
        with self._lock:
            self.requests.append(request)

    def _handler(self) -> type["_Handler"]:
        return type("_HubHandler", (_Handler,), {"hub": self})


class _Handler(BaseHTTPRequestHandler):
    hub: ModelHub
    protocol_version = "HTTP/1.1"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.note_request(HubRequest(method=self.command, path=self.path, headers=headers))
        parts = urlsplit(self.path)
        steps = [unquote(step) for step in parts.path.strip("/").split("/")]
        match steps:
            case ["api", "models"]:
                self._search(parse_qs(parts.query))
            case ["api", "models", owner, name]:
                self._model(f"{owner}/{name}", "main")
            case ["api", "models", owner, name, "revision", revision]:
                self._model(f"{owner}/{name}", revision)
            case ["api", "models", owner, name, "tree", revision, *_]:
                self._tree(f"{owner}/{name}", revision, parse_qs(parts.query))
            case [owner, name, "resolve", revision, *path] if path:
                self._resolve(f"{owner}/{name}", revision, "/".join(path))
            case ["cdn", hop, owner, name, *path] if path:
                self._cdn(f"{owner}/{name}", int(hop), "/".join(path))
            case ["files", *path] if "/".join(path) in self.hub.files:
                content = self.hub.files["/".join(path)]
                self._content(content, _etag(hashlib.md5(content, usedforsecurity=False).hexdigest()))
            case _:
                self._error(404, "", "not found")

    def _found(self, repo: str, revision: str) -> HubRepository | None:
        """Returns a repository that the caller may see; otherwise rejects the request like the hub."""
        found = self.hub.repositories.get(repo)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and not token):
            # The hub does not distinguish the two for callers without a token.
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif revision not in (*found.revisions, found.commit):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    def _search(self, query: Mapping[str, list[str]]) -> None:
        """Lists the public repositories whose name contains all words, as the hub does for `expand`."""
        status = self.hub.take_status()
        if status is not None:
            self._error(status, "", "on demand")
            return
        words, most = query.get("search", [""])[0].lower().split(), int(query.get("limit", ["100"])[0])
        found = {
            repo: each
            for repo, each in self.hub.repositories.items()
            if not each.private and all(word in repo.lower() for word in words)
        }
        listed = sorted(found.items(), key=lambda pair: -pair[1].downloads)[:most]
        self._json(
            [
                {
                    "id": repo,
                    "downloads": each.downloads,
                    "gguf": {"context_length": each.context_tokens} if each.context_tokens else None,
                    "siblings": [{"rfilename": path} for path in sorted(each.files)],
                }
                for repo, each in listed
            ]
        )

    def _model(self, repo: str, revision: str) -> None:
        found = self._found(repo, revision)
        if found is None:
            return
        siblings = [_sibling(path, content) for path, content in sorted(found.files.items())]
        gated = "manual" if found.gated else False
        gguf = {"context_length": found.context_tokens} if found.context_tokens else None
        about = {"id": repo, "sha": found.commit, "private": found.private, "gated": gated, "gguf": gguf}
        self._json(about | {"siblings": siblings})

    def _tree(self, repo: str, revision: str, query: Mapping[str, list[str]]) -> None:
        found = self._found(repo, revision)
        if found is None:
            return
        start = int(query.get("cursor", ["0"])[0])
        listed = sorted(found.files.items())
        page = [_tree_entry(path, content) for path, content in listed[start : start + TREE_PAGE]]
        following = start + TREE_PAGE
        path = urlsplit(self.path).path
        link = {"Link": f'<{self.hub.url}{path}?recursive=true&cursor={following}>; rel="next"'}
        self._json(page, link if following < len(listed) else {})

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        found = self._found(repo, revision)
        if found is None:
            return
        if found.gated and not self.headers.get("authorization"):
            self._error(401, "GatedRepo", f"Access to model {repo} is restricted.")
            return
        content = found.files.get(path)
        if content is None:
            self._error(404, "EntryNotFound", f"{path} does not exist")
            return
        headers = {"X-Repo-Commit": found.commit}
        if not path.endswith(LFS_SUFFIXES):
            self._content(found.lies.get(path, content), _etag(_git_digest(content)), headers)
            return
        headers |= {"X-Linked-Etag": _etag(hashlib.sha256(content).hexdigest()), "X-Linked-Size": str(len(content))}
        target = self.hub.faults.redirect_to or f"{self.hub.cdn_url}{self.hub.faults.redirects}/{repo}/{quote(path)}"
        self._plain(302, b"", headers | {"Location": target})

    def _cdn(self, repo: str, hop: int, path: str) -> None:
        """Serves the other origin: like object stores, it rejects a token in addition to the signed URL."""
        if self.headers.get("authorization"):
            self._error(400, "", "Only one auth mechanism allowed")
            return
        if hop > 1:
            self._plain(302, b"", {"Location": f"{CDN_PREFIX}{hop - 1}/{repo}/{quote(path)}"})
            return
        found = self.hub.repositories[repo]
        content = found.files[path]
        self._content(found.lies.get(path, content), _etag(hashlib.sha256(content).hexdigest()))

    def _content(self, content: bytes, etag: str, headers: Mapping[str, str] | None = None) -> None:
        status = self.hub.take_status()
        if status is not None:
            self._error(status, "", "on demand")
            return
        faults = self.hub.faults
        sent = dict(headers or {}) | {"Accept-Ranges": "bytes"}
        if not faults.sends_no_etag:
            sent["ETag"] = etag
        if not faults.sends_no_etag and self.headers.get("if-none-match") == etag:
            self._plain(304, b"", sent)
            return
        start, asked = 0, self.headers.get("range")
        whole = len(content)
        if asked and not faults.ignores_ranges and self.headers.get("if-range", etag) == etag:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            if start >= whole:
                self._plain(416, b"", sent | {"Content-Range": f"bytes */{whole}"})
                return
            sent["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        self.send_response(206 if "Content-Range" in sent else 200)
        if faults.drops_lengths:
            sent["Connection"] = "close"
        else:
            sent["Content-Length"] = str(whole - start)
        self._end_headers(sent)
        if self.command != "HEAD":
            self._send(content[start:])

    def _send(self, content: bytes) -> None:
        cut, done = self.hub.take_cut(), 0
        while done < len(content) and (cut is None or done < cut):
            if self.hub.faults.chunk_seconds:
                time.sleep(self.hub.faults.chunk_seconds)
            chunk = content[done : done + CHUNK_BYTES]
            chunk = chunk if cut is None else chunk[: cut - done]
            try:
                self.wfile.write(chunk)
                self.wfile.flush()
            except OSError:
                break
            done += len(chunk)
            self.hub.note_sent(len(chunk))
        if done < len(content) or self.hub.faults.drops_lengths:
            self.close_connection = True

    def _json(self, document: Any, headers: Mapping[str, str] | None = None) -> None:
        self._plain(200, json.dumps(document).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        if code:
            headers["X-Error-Code"] = code
        self._plain(status, json.dumps({"error": message}).encode(), headers)

    def _plain(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self._end_headers({**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _end_headers(self, headers: Mapping[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _etag(digest: str) -> str:
    return f'"{digest}"'


def _git_digest(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _git_digest(content)}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def _tree_entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_digest(content)}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


def repositories_in(folder: Path) -> dict[str, HubRepository]:
    """Returns the repositories in a folder: FOLDER/OWNER/REPO."""
    found = {}
    for repo in sorted(path for path in folder.glob("*/*") if path.is_dir()):
        files = {file.relative_to(repo).as_posix(): file.read_bytes() for file in repo.rglob("*") if file.is_file()}
        found[f"{repo.parent.name}/{repo.name}"] = HubRepository(files=files)
    return found


def main() -> None:
    """Serves the repositories of a folder until it is ended."""
    parser = argparse.ArgumentParser(description="A hub of models for tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=int, default=0)
    asked = parser.parse_args()
    hub = ModelHub(port=asked.port)
    hub.repositories = repositories_in(asked.folder)
    if asked.bytes_per_second:
        hub.faults.chunk_seconds = CHUNK_BYTES / asked.bytes_per_second
    with hub.running():
        sys.stdout.write(f"{hub.url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
