"""Downloads a file over HTTP into a partial file, with ranges, resumption, redirects, digests and limits.

huggingface_hub's own transfer starts over in each process and only compares sizes (docs/decisions/0044), so downloads
from the hub and from other servers are implemented here.
"""

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urljoin, urlsplit

import msgspec

from runner_svc.model_files.whole_file import require_whole
from runner_svc.model_store.http_range import FileVersion, content_range, is_part, number_of
from runner_svc.model_store.store import RoomChecks
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.models.model_source import LOOPBACK_HOSTS
from weft.kernel.values.units import size_words

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 30.0
READ_SECONDS = 60.0
"""Maximum time without a byte."""
MAX_REDIRECTS = 5
MAX_ATTEMPTS = 6
"""Maximum number of consecutive attempts without a byte."""
MAX_RESTARTS = 5
"""Maximum number of times that one download starts again from the first byte."""
MAX_PAUSE_SECONDS = 30.0
"""Maximum pause between attempts, even if the server requests a longer one."""
CHUNK_BYTES = 1024**2
MAX_STATE_BYTES = 8_192
MAX_VALIDATOR_CHARS = 1_024
"""Maximum length of an ETag or a date; a longer one counts as missing."""
MAX_FILE_BYTES = 2**42
"""Maximum file size if it is not known in advance: 4 TiB."""
_REDIRECTS = (301, 302, 303, 307, 308)
_UNAUTHENTICATED, _FORBIDDEN, _NOT_FOUND, _GONE = 401, 403, 404, 410
_BEYOND_END = 416
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOrder:
    """A file to download."""

    name: str
    """For people."""
    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent only to the URL's own server, not after a redirect to another."""
    partial: Path
    """The target file; existing content is resumed."""
    size_bytes: int | None = None
    """None: unknown."""
    sha256: str = ""
    git_digest: str = ""
    """Expected digests in hex; empty: unknown."""
    known_etag: str = ""
    """Validator of the existing content: if the server still has it, nothing is downloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFile:
    """The result of a download."""

    sha256: str
    size_bytes: int
    etag: str = ""
    """The server's validator; empty: it sends none, or a weak one."""


@dataclass(slots=True, kw_only=True)
class TransferPorts:
    """Callbacks and limits of a transfer."""

    client: "httpx2.Client"
    on_bytes: Callable[[int], None]
    """Called repeatedly with the size of the content so far."""
    require_room: Callable[[int], None] = lambda _: None
    """Called with the number of bytes to come, at most ROOM_BYTES each time; raises if they do not fit."""
    on_total: Callable[[int], None] = lambda _: None
    """Called with the size of the whole file before its first byte, if the server announces it; may raise."""
    on_note: Callable[[str], None] = lambda _: None
    """Called with events to display, such as a lost connection."""
    restrict: Callable[["httpx2.Response | None"], None] = lambda _: None
    """Called before the first request with None, and with each redirect before it is followed."""
    sleep: Callable[[float], None] = time.sleep
    allow_http: bool = False
    """Whether other machines may be contacted without encryption."""


class _BrokenError(Exception):
    """An attempt failed, but a retry may succeed."""

    def __init__(self, why: str, pause_seconds: float = 0.0) -> None:
        super().__init__(why)
        self.pause_seconds = pause_seconds


class _ChangedError(Exception):
    """The server's answer does not continue the existing content: the download starts again."""


class _NotModifiedError(Exception):
    """The server still has the existing content."""


def require_allowed_url(url: str, *, allow_http: bool) -> None:
    """Raises INVALID_ARGUMENT for an http URL of another machine, unless a setting allows it.

    The message has only the host: a query may be a credential.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and (allow_http or parts.hostname in LOOPBACK_HOSTS)):
        return
    raise WeftError(
        Reason.INVALID_ARGUMENT,
        f"{parts.scheme}://{parts.netloc} is not encrypted; use https, or set model_store.allow_http",
    )


class FileTransfer:
    """The download of one file."""

    def __init__(self, order: FileOrder, ports: TransferPorts) -> None:
        self._order = order
        self._ports = ports
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(usedforsecurity=False)
        self._size = 0
        self._version = FileVersion()
        self._is_framed = False
        """Whether the last response stated where it ends."""
        self._restarts = 0
        self._room = RoomChecks(ports.require_room)

    def run(self) -> LoadedFile | None:
        """Downloads the file and checks it; None: the server still has the content of `known_etag`.

        Without a digest, its size must be the announced one, and the header of a model file must account for all of it.
        Raises NOT_FOUND, PERMISSION_DENIED, SERVICE_UNAVAILABLE, INVALID_ARGUMENT (no space) or BACKEND_PROTOCOL_ERROR
        (wrong digest or size, which removes the content). After the other errors and after Ctrl-C, the next run resumes
        the download if a digest or a validator of the server proves that both parts belong together.
        """
        self._order.partial.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        resumed = self._begin()
        while True:
            try:
                self._load()
                self._check()
            except _NotModifiedError:
                return None
            except _WrongContentError as error:
                self._discard()
                if not resumed:
                    raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, str(error)) from None
                # The content of an earlier run may be the cause.
                resumed = False
                self._ports.on_note(f"{error}; it is downloaded again")
                self._reset()
                continue
            except WeftError:
                if not self._is_resumable:
                    self._discard()
                raise
            self._state_file.unlink(missing_ok=True)
            etag = self._version.etag
            etag = "" if etag.startswith("W/") else etag
            return LoadedFile(sha256=self._sha256.hexdigest(), size_bytes=self._size, etag=etag)

    @property
    def _state_file(self) -> Path:
        return self._order.partial.with_name(f"{self._order.partial.name}.json")

    def _begin(self) -> bool:
        """Reads the state of an earlier run; returns whether there is any."""
        try:
            left = self._order.partial.stat().st_size
        except FileNotFoundError:
            return False
        self._version = self._saved_version()
        is_too_long = self._order.size_bytes is not None and left > self._order.size_bytes
        if is_too_long or not self._is_resumable:
            self._discard()
            return False
        self._read_left()
        return left > 0

    @property
    def _has_digest(self) -> bool:
        return bool(self._order.sha256 or self._order.git_digest)

    @property
    def _is_resumable(self) -> bool:
        return self._has_digest or bool(self._version.validator)

    @property
    def _kept_words(self) -> str:
        kept = self._size and self._is_resumable
        return f"; {size_words(self._size)} are kept for the next pull" if kept else ""

    def _reset(self) -> None:
        self._sha256, self._git, self._size = hashlib.sha256(), hashlib.sha1(usedforsecurity=False), 0
        if self._order.git_digest:
            self._git.update(f"blob {self._order.size_bytes or 0}\0".encode())
        self._ports.on_bytes(0)

    def _read_left(self) -> None:
        self._reset()
        with self._order.partial.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                self._note(chunk)

    def _note(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        if self._order.git_digest:
            self._git.update(chunk)
        self._size += len(chunk)
        self._ports.on_bytes(self._size)

    def _load(self) -> None:
        """Downloads the missing part, over several connections if needed."""
        fruitless = 0
        if not self._size:
            self._reset()
        with self._order.partial.open("ab") as file:
            while self._order.size_bytes is None or self._size < self._order.size_bytes:
                before = self._size
                try:
                    self._attempt(file)
                except (_BrokenError, _ChangedError) as error:
                    fruitless = 0 if self._size > before else fruitless + 1
                    if isinstance(error, _ChangedError) or (self._size and not self._is_resumable):
                        self._start_again(file, error)
                    if fruitless >= MAX_ATTEMPTS:
                        raise WeftError(
                            Reason.SERVICE_UNAVAILABLE, f"{self._order.name}: {error}{self._kept_words}"
                        ) from None
                    self._ports.on_note(f"{self._order.name}: {error}; retrying")
                    backoff = random.uniform(0.5, 1.0) * 2**fruitless  # noqa: S311 - spreads attempts
                    pause = error.pause_seconds if isinstance(error, _BrokenError) else 0.0
                    self._ports.sleep(min(MAX_PAUSE_SECONDS, max(pause, backoff)))
                else:
                    return
                finally:
                    file.flush()

    def _attempt(self, file: BinaryIO) -> None:
        """Downloads over one connection; returns when the file is complete. Raises _BrokenError otherwise."""
        import httpx2  # noqa: PLC0415 - only this command needs it

        try:
            with self._opened() as response:
                end = self._end_of(response, file)
                for chunk in response.iter_raw() if self._size != end else ():
                    if self._size + len(chunk) > (MAX_FILE_BYTES if end is None else end):
                        raise _WrongContentError(f"{self._order.name} is longer than the server announced")
                    self._room.before(self._size, len(chunk), self._total)
                    file.write(chunk)
                    self._note(chunk)
        except httpx2.HTTPError as error:
            raise _BrokenError(_words_of(error, urlsplit(self._order.url).netloc)) from None
        except OSError as error:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"{self._order.name} cannot be written: {error.strerror}{self._kept_words}",
            ) from error
        if self._total is None and end is not None:
            raise _BrokenError("the server sent a part and does not say how long the file is")
        if self._total is not None and self._size < self._total:
            raise _BrokenError("the connection ended early")

    @property
    def _total(self) -> int | None:
        """Size of the whole file; None: unknown."""
        return self._version.total if self._order.size_bytes is None else self._order.size_bytes

    @contextmanager
    def _opened(self) -> "Iterator[httpx2.Response]":
        """Requests the missing part, follows redirects, and yields the response."""
        import httpx2  # noqa: PLC0415

        url, headers = self._order.url, {**self._order.headers, "Accept-Encoding": "identity"}
        if self._size:
            headers["Range"] = f"bytes={self._size}-"
            if self._version.validator and not self._has_digest:
                headers["If-Range"] = self._version.validator
        elif self._order.known_etag:
            headers["If-None-Match"] = self._order.known_etag
        self._ports.restrict(None)
        timeout = httpx2.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        for _ in range(MAX_REDIRECTS + 1):
            require_allowed_url(url, allow_http=self._ports.allow_http)
            with self._ports.client.stream(
                "GET", url, headers=headers, timeout=timeout, follow_redirects=False
            ) as response:
                if response.status_code not in _REDIRECTS:
                    yield response
                    return
                target = urljoin(url, response.headers.get("location", ""))
                self._ports.restrict(response)
            if _is_downgrade(url, target):
                raise WeftError(
                    Reason.PERMISSION_DENIED, f"{self._order.name}: the server redirects to an unencrypted URL"
                )
            if _origin(target) != _origin(url):
                headers = {name: value for name, value in headers.items() if name not in self._order.headers}
            url = target
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"{self._order.name}: more than {MAX_REDIRECTS} redirects, one after the other"
        )

    def _end_of(self, response: "httpx2.Response", file: BinaryIO) -> int | None:
        """Returns the position in the file at which a response ends; None: unknown.

        Drops the partial file if the response is the whole file.
        """
        total, end = self._extent_of(response)
        if response.headers.get("content-encoding", "identity") != "identity":
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{self._order.name}: the server sends it compressed")
        if not is_part(response):
            self._restart(file)
        self._is_framed = bool({"content-length", "transfer-encoding"} & response.headers.keys())
        self._follow_version(response, total)
        expected = self._order.size_bytes
        if expected is not None and total is not None and total != expected:
            raise _WrongContentError(
                f"{self._order.name} has {total} bytes on the server, and its repository lists {expected}"
            )
        if self._total is not None and self._total > self._size:
            self._ports.on_total(self._total - self._size)
        return expected if end is None else end

    def _extent_of(self, response: "httpx2.Response") -> tuple[int | None, int | None]:
        """Returns the size of the whole file, and the position at which a response ends; None: unknown.

        Raises _ChangedError if the response does not continue the partial file, and the error for an error response.
        """
        announced = number_of(response.headers.get("content-length"))
        span = content_range(response.headers.get("content-range", ""))
        match response.status_code:
            # Some hosts send the requested part with the status of a whole file.
            case 200 | 206 if is_part(response):
                most = MAX_FILE_BYTES if span.total is None else span.total - 1
                if span.begin != self._size or span.end is None or not self._size <= span.end <= most:
                    raise _ChangedError("the server sent another part than requested")
                return span.total, span.end + 1
            case 200:
                # Only its length tells the whole file from a part without a label.
                if self._size and (announced is None or announced != self._version.total):
                    raise _ChangedError("the server did not send the requested part")
                return announced, announced
            case 304:
                raise _NotModifiedError
            case 416:
                if not self._size or span.total != self._size:
                    raise _ChangedError("the file on the server is shorter than the downloaded part")
                return self._size, self._size
            case _:
                raise _error_of(response, self._order.name)

    def _follow_version(self, response: "httpx2.Response", total: int | None) -> None:
        """Stores the version of the content. Raises _ChangedError if the response is of another one."""
        said = (str(response.headers.get(name, "")) for name in ("etag", "last-modified"))
        etag, modified = (text if len(text) <= MAX_VALIDATOR_CHARS else "" for text in said)
        found, known = FileVersion(etag, modified, total), self._version
        if response.status_code == _BEYOND_END:
            found = FileVersion(known.etag, known.modified, total)
        elif self._size and self._has_digest:
            # The digest decides about everything but a size that cannot be right.
            known = FileVersion(found.etag, found.modified, known.total)
        if self._size:
            if not found.continues(known):
                raise _ChangedError("the file has changed at the server")
            found = FileVersion(known.etag, known.modified, found.total if known.total is None else known.total)
        if found != self._version or not self._state_file.exists():
            self._version = found
            replace_file(self._state_file, msgspec.json.encode(found))

    def _start_again(self, file: BinaryIO, why: Exception) -> None:
        """Drops the content, of which no part may be kept. Raises SERVICE_UNAVAILABLE after MAX_RESTARTS times."""
        self._restart(file)
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"{self._order.name}: {why}; it was downloaded {self._restarts} times from the start, because the "
                "server's answers cannot be put together to one file",
            )

    def _restart(self, file: BinaryIO) -> None:
        file.truncate(0)
        self._room = RoomChecks(self._ports.require_room)
        self._version = FileVersion()
        self._reset()

    def _check(self) -> None:
        """Raises _WrongContentError unless the content has the expected size and digests."""
        order = self._order
        if order.size_bytes is not None and self._size != order.size_bytes:
            raise _WrongContentError(f"{order.name} has {self._size} bytes instead of {order.size_bytes}")
        if order.sha256 and self._sha256.hexdigest() != order.sha256:
            raise _WrongContentError(
                f"{order.name} has the SHA-256 {self._sha256.hexdigest()} instead of {order.sha256}: the download is "
                "corrupt, or the file is not the one that its source states; it was removed"
            )
        if order.git_digest and self._git.hexdigest() != order.git_digest:
            raise _WrongContentError(f"{order.name} is not the file that its repository lists; it was removed")
        if not self._has_digest:
            self._require_whole()

    def _require_whole(self) -> None:
        """Raises _WrongContentError unless the length or the header shows that content without a digest is whole."""
        name = self._order.name
        try:
            is_proven = require_whole(self._order.partial, name)
        except WeftError as error:
            raise _WrongContentError(f"{name} is not whole: {error.message}; it was removed") from None
        if not is_proven and self._total is None and not self._is_framed:
            raise _WrongContentError(
                f"{name} may be incomplete: the server did not announce its length; state its SHA-256 as "
                "URL#sha256=DIGEST; it was removed"
            )

    def _saved_version(self) -> FileVersion:
        with suppress(OSError, ValueError, msgspec.DecodeError), self._state_file.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_STATE_BYTES), type=FileVersion)
        return FileVersion()

    def _discard(self) -> None:
        self._order.partial.unlink(missing_ok=True)
        self._state_file.unlink(missing_ok=True)


class _WrongContentError(Exception):
    """The content has an unexpected size or digest."""


def _error_of(response: "httpx2.Response", name: str) -> Exception:
    """Returns the error for a server's error response."""
    code = response.status_code
    if code in _TRANSIENT:
        pause = number_of(response.headers.get("retry-after")) or 0
        return _BrokenError(f"the server answered {code}", pause)
    if code == _UNAUTHENTICATED:
        return WeftError(
            Reason.PERMISSION_DENIED, f"{name}: the server requires authentication (401); set HF_TOKEN for the hub"
        )
    if code == _FORBIDDEN:
        return WeftError(Reason.PERMISSION_DENIED, f"{name}: the server refuses it (403); the token may not read it")
    if code in (_NOT_FOUND, _GONE):
        return WeftError(Reason.NOT_FOUND, f"{name}: the server does not have it ({code})")
    return WeftError(Reason.SERVICE_UNAVAILABLE, f"{name}: the server answered {code}")


def _words_of(error: Exception, server: str) -> str:
    import httpx2  # noqa: PLC0415

    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return f"{server} has a certificate that is not trusted here; behind a proxy, set SSL_CERT_FILE to its roots"
    if isinstance(error, httpx2.ConnectTimeout | httpx2.ConnectError):
        return f"{server} cannot be reached"
    if isinstance(error, httpx2.TimeoutException):
        return f"the server sent nothing for {READ_SECONDS:.0f} s"
    return "the connection broke"


def _is_downgrade(url: str, target: str) -> bool:
    return urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https"


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
