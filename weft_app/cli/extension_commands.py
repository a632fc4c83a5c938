"""The commands and kinds of extensions, those that weft.yaml does not disable."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.extension import CommandHook

FILES = ("weft.yaml", "weft.local.yaml")
FILE_VARIABLES = ("LLM_POOL_SETTINGS_PATH", "LLM_POOL_LOCAL_SETTINGS_PATH")
"""What `weft_app.config.loader` reads, whose import takes longer than the help."""


@lru_cache
def extension_commands() -> "Mapping[str, CommandHook]":
    """Returns the commands by the words after `weft`; of two with the same words the first, so weft's own."""
    from weft.extension import all_extensions, disabled_extensions  # noqa: PLC0415 - a listed command needs none of it

    found = all_extensions()
    off = disabled_extensions(found, _disabled_here())
    commands: dict[str, CommandHook] = {}
    for hook in (hook for each in found if each.name not in off for hook in each.commands):
        commands.setdefault(hook.words, hook)
    return commands


def off_command(path: str) -> str:
    """Returns the message for a command of an extension that is off; empty: it is another one."""
    from weft.extension import all_extensions, disabled_extensions  # noqa: PLC0415 - as above

    found = all_extensions()
    off = disabled_extensions(found, _disabled_here())
    for each in found:
        if each.name in off and path in {hook.words for hook in each.commands}:
            return f"the command {path} belongs to the extension {each.name}, which is off: {off[each.name]}"
    return ""


def kinds_off_here() -> Mapping[str, str]:
    """Returns why kinds of resources are off, by kind."""
    if not (disabled := _disabled_here()):
        return {}
    from weft.extension import kinds_off  # noqa: PLC0415 - as above

    return kinds_off(disabled)


@lru_cache
def _disabled_here() -> tuple[str, ...]:
    """Returns what the configuration of this folder or environment disables; nothing if it cannot be read."""
    if not _may_disable():
        return ()
    from weft.kernel.errors.error_tree import WeftError  # noqa: PLC0415 - the help imports little
    from weft_app.config.loader import load_config  # noqa: PLC0415 - as above

    try:
        return load_config(None).extensions.disabled
    except WeftError:
        return ()


def _may_disable() -> bool:
    """Whether a file could disable something: reading a whole configuration takes longer than most commands."""
    if any(os.environ.get(name) for name in FILE_VARIABLES):
        return True
    with suppress(OSError):
        return any(b"extensions" in file.read_bytes() for file in map(Path, FILES) if file.is_file())
    return False
