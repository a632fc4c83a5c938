"""The commands of extensions, those that weft.yaml does not disable."""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from weft.extension import CommandHook, Extension, all_extensions, disabled_extensions


@lru_cache
def extension_commands() -> Mapping[str, CommandHook]:
    """Returns the commands by the words after `weft`."""
    found = all_extensions()
    off = disabled_extensions(found, _disabled_here())
    return dict(_commands(each for each in found if each.name not in off))


def off_command(path: str) -> str:
    """Returns the message for a command of an extension that is off; empty: it is another one."""
    found = all_extensions()
    for name, why in disabled_extensions(found, _disabled_here()).items():
        if path in dict(_commands(each for each in found if each.name == name)):
            return f"the command {path} belongs to the extension {name}, which is off: {why}"
    return ""


def _commands(extensions: Iterator[Extension]) -> Iterator[tuple[str, CommandHook]]:
    for extension in extensions:
        for hook in extension.commands:
            yield hook.words, hook


@lru_cache
def _disabled_here() -> tuple[str, ...]:
    """Returns what the configuration of this folder or environment disables; nothing if it cannot be read."""
    from weft.kernel.errors.error_tree import WeftError  # noqa: PLC0415 - the help imports little
    from weft_app.config.loader import config_files, load_config  # noqa: PLC0415 - as above

    try:
        # Reading a whole configuration takes longer than most commands.
        if any(b"extensions" in file.read_bytes() for file in config_files(None)):
            return load_config(None).extensions.disabled
    except (OSError, WeftError):
        return ()
    return ()
