"""Names and ids: validation, generation, and suggestions for misspelt names."""

import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from hashlib import sha256
from heapq import nsmallest

from weft.kernel.errors.error_tree import invalid_field

_JOINERS = "\u200c\u200d"
"""Zero-width characters within words of Persian and Hindi."""
MAX_NAME_CHARS = 128
MAX_REQUEST_ID_CHARS = 128
MAX_TENANT_CHARS = 64
MAX_CACHE_TAG_CHARS = 64
MAX_CLIENT_CHARS = 64
MAX_SESSION_CHARS = 256

DEFAULT_TENANT = "default"
AGENT_PREFIX = "agent/"
ROUTE_PREFIX = "route/"
WORKFLOW_PREFIX = "workflow/"
KIND_PREFIXES = (AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX)
"""Prefixes of agents, routes and workflows in the `model` of a request. No model name starts with one."""
AUTO_MODEL = "auto"
"""`model` of a request that lets the client's profile in the router choose."""
CENTRAL_RUNNER = "central-models"
SECRET_PREFIX = "secret/"  # noqa: S105 - a name prefix, not a password
"""Name of the mesh's built-in runner, which serves declared models of remote providers."""

MODEL_NAME_WORDS = (
    f"1 to {MAX_NAME_CHARS} letters, digits, '.', '_', ':' or '-', starting with a letter or digit, "
    "or several such parts joined by '/', the first one not agent, route or workflow"
)
# For runners, agents and other resources, and for each part of a model name. ASCII only, so that no two names look
# alike; the first character keeps a name from being read as an option or a hidden file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
# Models and pools may have an owner before their name, as on the hub.
_MODEL_NAME = re.compile(rf"{_NAME.pattern}(/{_NAME.pattern})*")
MODEL_NAME_PATTERN = f"^{_MODEL_NAME.pattern}$"
"""Pattern of model names for JSON schemas; does not check length and reserved prefixes."""
# Ids and tenants travel as gRPC metadata and HTTP headers: printable ASCII without spaces and separators.
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=-]*")
_RANDOM_BYTES = 12
_ID_DIGITS = 2 * _RANDOM_BYTES
_NAME_END = "/"
"""Separates the process name from the rest of a process id."""
_RESOURCE_ID = re.compile(rf"(?:model|agent|route)-[0-9a-f]{{{_ID_DIGITS}}}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]+")


def is_name(text: str) -> bool:
    """Whether `text` is a valid resource name."""
    return 0 < len(text) <= MAX_NAME_CHARS and _NAME.fullmatch(text) is not None


def is_model_name(text: str) -> bool:
    """Whether `text` is a valid name of a model or pool: names joined by '/', such as `Qwen/Qwen3-8B`."""
    is_valid = 0 < len(text) <= MAX_NAME_CHARS and _MODEL_NAME.fullmatch(text) is not None
    return is_valid and not text.startswith(KIND_PREFIXES)


def ascii_name(text: str) -> str:
    """Returns a model name with non-ASCII parts in Punycode, as in host names; other texts unchanged.

    Servers and callers may use any letters and signs, and different names stay different. A text with spaces, control
    characters or changes of direction is no name in any script, and stays unchanged.
    """
    if text.isascii() or len(text) > MAX_NAME_CHARS:
        return text
    signs = (char for char in text if not char.isascii() and char not in _JOINERS)
    if any(unicodedata.category(char)[0] in "CZ" for char in signs):
        return text
    parts = text.split("/")
    return "/".join(part if part.isascii() else f"xn--{part.encode('punycode').decode()}" for part in parts)


def is_token(text: str, max_chars: int) -> bool:
    """Whether `text` is a safe identifier of at most `max_chars` characters."""
    return 0 < len(text) <= max_chars and _TOKEN.fullmatch(text) is not None


def require_name(text: str, field: str) -> str:
    """Returns `text`. Raises INVALID_ARGUMENT naming `field` unless it is a valid resource name."""
    if not is_name(text):
        raise invalid_field(
            field,
            f"must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_', ':' or '-', starting with a letter or digit",
        )
    return text


def require_name_of_model(text: str, field: str) -> str:
    """Returns `ascii_name` of `text`. Raises INVALID_ARGUMENT naming `field` unless it may name a model or a pool."""
    name = ascii_name(text)
    if not is_model_name(name):
        raise invalid_field(field, f"must be {MODEL_NAME_WORDS}")
    return name


def require_token(text: str, field: str, max_chars: int) -> str:
    """Returns `text`. Raises INVALID_ARGUMENT naming `field` unless it is a safe identifier."""
    if not is_token(text, max_chars):
        raise invalid_field(
            field, f"must be 1 to {max_chars} letters, digits or '._:@/+=-', starting with a letter or digit"
        )
    return text


def require_request_id(text: str, field: str) -> str:
    """Returns `text`. Raises INVALID_ARGUMENT naming `field` unless it is a valid request id for operations."""
    if len(text) > MAX_REQUEST_ID_CHARS or _REQUEST_ID.fullmatch(text) is None:
        raise invalid_field(field, f"must be 1 to {MAX_REQUEST_ID_CHARS} letters, digits, '.', '_' or '-'")
    return text


def resource_id(kind: str, name: str, created_nanoseconds: int) -> str:
    """Returns the id of a model, agent or route. A resource that is deleted and recreated gets a new one."""
    digest = sha256(f"{kind}/{name}/{created_nanoseconds}".encode()).hexdigest()
    return f"{kind}-{digest[:_ID_DIGITS]}"


def is_resource_id(text: str) -> bool:
    """Whether `text` has the form of a model, agent or route id: "model-" and 24 hex digits."""
    return _RESOURCE_ID.fullmatch(text) is not None


def require_no_id(text: str, field: str) -> None:
    """Raises INVALID_ARGUMENT for a name with the form of an id, since it could shadow the resource with that id."""
    if is_resource_id(text):
        raise invalid_field(field, f"must not have the form of an id, '{text}'; choose another name")


def new_id(prefix: str) -> str:
    """Returns a new id such as `req-9f2c...`, with 96 random bits."""
    return f"{prefix}-{os.urandom(_RANDOM_BYTES).hex()}"


def new_process_id(name: str) -> str:
    """Returns a new id for one start of a process, such as `router-box-5f1c02/9f2c...`. Cuts a long name."""
    start = f"{_NAME_END}{os.urandom(_RANDOM_BYTES).hex()}"
    return f"{name[: MAX_NAME_CHARS - len(start)]}{start}"


def process_name(process_id: str) -> str:
    """Returns the process name in the id of a process start; any other id unchanged."""
    return process_id.partition(_NAME_END)[0]


def new_key() -> bytes:
    """Returns a new symmetric key of 32 random bytes."""
    return secrets.token_bytes(32)


MAX_CLOSE_NAMES = 3
_COMPARED_NAMES = 1000
"""Maximum names compared letter by letter, those of the most similar length first: each takes 40 us."""
_SEARCHED_NAMES = 10_000
"""Maximum names searched for the text: each takes 2 us."""
_LEAST_PART_CHARS = 3
"""Minimum length of a text for matching names that contain it."""
_LEAST_BEGINNING_CHARS = 4
"""Minimum length of a text for matching names with a similar beginning."""
_BEGINNING_CUTOFF = 0.81
"""Required similarity of a beginning: allows one wrong or missing letter, as in "smolm" for "smollm2-135m"."""


def closest_names(name: str, names: Iterable[str], most: int = MAX_CLOSE_NAMES) -> tuple[str, ...]:
    """Returns up to `most` names: that begin with `name`, contain it, are similar, or have a similar beginning.

    Ignores case and a prefix such as `agent/`.
    """
    wanted = _compared(name)
    by_text: dict[str, list[str]] = {}
    for each in sorted(names)[:_SEARCHED_NAMES]:
        by_text.setdefault(_compared(each), []).append(each)
    alike = nsmallest(_COMPARED_NAMES, by_text, key=lambda text: abs(len(text) - len(wanted)))
    containing = [text for text in by_text if wanted in text] if len(wanted) >= _LEAST_PART_CHARS else []
    containing.sort(key=lambda text: not text.startswith(wanted))
    found = [*containing, *get_close_matches(wanted, alike, n=most)]
    if len(found) < most:
        found += _beginning_alike(wanted, alike, most)
    return tuple(dict.fromkeys(each for text in found for each in by_text[text]))[:most]


def _beginning_alike(wanted: str, texts: Iterable[str], most: int) -> list[str]:
    """Returns longer texts with a beginning similar to `wanted`."""
    length = len(wanted)
    if length < _LEAST_BEGINNING_CHARS:
        return []
    by_beginning: dict[str, list[str]] = {}
    for text in sorted(texts):
        if len(text) > length:
            for beginning in {text[:length], text[: length + 1]}:
                by_beginning.setdefault(beginning, []).append(text)
    close = get_close_matches(wanted, by_beginning, n=most, cutoff=_BEGINNING_CUTOFF)
    return [text for beginning in close for text in by_beginning[beginning]]


def _compared(name: str) -> str:
    return name[:MAX_NAME_CHARS].rpartition("/")[2].lower()


def did_you_mean(close: Sequence[str]) -> str:
    """Returns a "did you mean" question with the names; empty if there are none."""
    return f"did you mean {' or '.join(close)}?" if close else ""


def close_names(name: str, names: Iterable[str], most: int = MAX_CLOSE_NAMES) -> str:
    """Returns a "did you mean" question with the closest names; empty if there are none."""
    return did_you_mean(closest_names(name, names, most))


ANY = "*"
"""Wildcard at the end of a pattern."""


def check_alias(name: str, pattern: str, target: str, tenant: str, field: str = "") -> None:
    """Raises INVALID_ARGUMENT naming the invalid field below `field`. An empty pattern means the name."""
    within = f"{field}." if field else ""
    pattern = pattern or name
    _check_pattern(pattern, f"{within}pattern")
    prefix = next((prefix for prefix in KIND_PREFIXES if target.startswith(prefix)), "")
    if not (is_name(target.removeprefix(prefix)) if prefix else is_model_name(target)):
        raise invalid_field(
            f"{within}target", "must be a model or a pool by name, agent/NAME, route/NAME or workflow/NAME"
        )
    if target == pattern:
        raise invalid_field(f"{within}target", "must be another name than the alias stands for")
    if tenant and not is_token(tenant, MAX_TENANT_CHARS):
        raise invalid_field(f"{within}tenant", f"must be at most {MAX_TENANT_CHARS} letters, digits or '._:@/+=-'")


LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


def with_twin(name: str) -> tuple[str, str]:
    """Returns a name, and the one that Ollama's clients use for it, too: with or without LATEST."""
    return name, name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ANY) else name == pattern


def _check_pattern(pattern: str, field: str) -> None:
    beginning = pattern.removesuffix(ANY)
    if len(pattern) > MAX_NAME_CHARS or (beginning and not is_token(beginning, MAX_NAME_CHARS)):
        raise invalid_field(
            field,
            f"must be one name, or a beginning of names and '*', such as claude-*: at most {MAX_NAME_CHARS} letters, "
            "digits or '._:@/+=-', starting with a letter or digit",
        )
    if pattern == AUTO_MODEL or pattern.startswith(KIND_PREFIXES) or is_resource_id(pattern):
        raise invalid_field(field, "must not be 'auto', an id, or begin with agent/ or route/: these have a meaning")
