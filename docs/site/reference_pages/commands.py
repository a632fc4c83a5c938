"""The commands with their arguments and options, from their help."""

import inspect
from collections.abc import Iterator
from typing import Any

from weft.extension import Extension, own_extensions
from weft_app.cli.commands import PANELS
from weft_app.cli.main import PANEL_OF_EXTENSIONS, load, loaded_commands

_HEAD = """# Commands

`weft COMMAND --help` prints the same. [Start](../start.md) has the commands of the first hour.
"""


def page() -> str:
    """Returns the page: the commands by panel, each with its commands."""
    lines = [_HEAD]
    of_extensions = [words for each in own_extensions() for words in _groups(each)]
    for panel, names in (*PANELS.items(), (PANEL_OF_EXTENSIONS, of_extensions)):
        lines.append(f"## {panel}\n")
        for name in names:
            lines += _command(name, load(name))
    return "\n".join(lines)


def _groups(extension: Extension) -> Iterator[str]:
    """Yields the commands of an extension that belong to no group of the core."""
    return (hook.words for hook in extension.commands if " " not in hook.words)


def _command(path: str, command: Any) -> Iterator[str]:
    yield f"### weft {path}\n"
    yield f"{_text(command.help)}\n"
    parameters = [each for each in command.params if each.name not in ("help", "install_completion", "show_completion")]
    rows = [row for each in parameters if not getattr(each, "hidden", False) for row in _row(each)]
    if rows:
        yield from ("| argument or option | meaning |", "|---|---|", *rows, "")
    for name, each in loaded_commands(path, command).items():
        yield from _command(f"{path} {name}", each)


def _row(parameter: Any) -> Iterator[str]:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    yield f"| {names} | {_text(getattr(parameter, 'help', '')).replace('|', chr(92) + '|')} |"


def _text(text: str | None) -> str:
    """Returns a help text as Markdown: paragraphs are kept, and nothing is HTML."""
    cleaned = inspect.cleandoc(text or "").replace("\b\n", "").replace("\f", "")
    return cleaned.replace("<", "&lt;").strip() if "\n" in cleaned else cleaned.replace("<", "&lt;")
