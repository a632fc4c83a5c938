"""What earlier releases had, and what replaces it: kinds, commands, HTTP paths, settings, runtimes."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

KINDS: Mapping[str, str] = MappingProxyType(
    {"profile": "weft apply -f FILE for its documents, and weft load MODEL for its models"}
)
"""Replacements of kinds of resources. Stored documents of such kinds stay in the database."""
_LOG_LEVEL = "log.level in weft.yaml (or LOG_LEVEL), and a restart of the process"
_SIGN = "weft keys sign with --shared-key FILE and --signer ID for each signer"
COMMANDS: Mapping[str, str] = MappingProxyType(
    {"mesh profile": KINDS["profile"], "mesh log-level": _LOG_LEVEL, "keys approve": _SIGN, "keys sign new-key": _SIGN}
)
"""Replacements of commands, by the words after `weft`."""

PATHS: Mapping[str, str] = MappingProxyType({"/api/v1/profiles": KINDS["profile"], "/v1/admin/log-level": _LOG_LEVEL})
"""Replacements of HTTP paths, by their beginning."""

RUNTIMES: Mapping[str, str] = MappingProxyType({"espeak_ng": "runtime: piper, after weft runtime install speech"})
"""Replacements of runtimes."""

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "registry.governance.signers.*.public_key": "registry.governance.mode: shared_key, with a key_file",
        "registry.governance.policy_version": "another key in registry.governance.key_file",
        "registry.governance.audience": "a separate key_file for each registry",
    }
)
"""Replacements of settings of weft.yaml, by their paths; `*` is every item of a list."""


def removed_kind(word: str) -> str:
    """Returns the message for the singular or plural of a removed kind; empty: it is another word."""
    replacement = KINDS.get(word) or KINDS.get(word.removesuffix("s"))
    return "" if replacement is None else f"{word.removesuffix('s')}s were removed; use: {replacement}"


def removed_documents(kind: str, names: Iterable[str]) -> str:
    """Returns the message for stored documents of a removed kind."""
    return unused_documents(removed_kind(kind), kind, names)


def unused_documents(why: str, kind: str, names: Iterable[str]) -> str:
    """Returns the message for stored documents of a kind that cannot be used."""
    return f"{why}. Stored and not used: {', '.join(f'{kind}/{name}' for name in sorted(names))}"


def removed_command(path: str) -> str:
    """Returns the message for a removed command; empty: it is another one."""
    replacement = COMMANDS.get(path)
    return "" if replacement is None else f"the command {path} was removed; use: {replacement}"


def removed_path(path: str) -> str:
    """Returns the message for a removed HTTP path; empty: it is another one."""
    found = (each for each in PATHS if path == each or path.startswith(f"{each}/"))
    return next((f"{each} was removed; use: {PATHS[each]}" for each in found), "")
