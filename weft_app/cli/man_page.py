"""The manual page weft(1), of the same texts as the help.

Imports the standard library alone, as building the wheel writes it.
"""

from collections.abc import Iterator, Mapping

from weft.extension import own_extensions
from weft_app.cli.commands import GROUPS, PANELS

_INTRODUCTION = """\
.SH NAME
weft \\- one endpoint for all models that you can reach or wake
.SH SYNOPSIS
.B weft
.I COMMAND
.RI [ OPTIONS ]
.br
.B weft help
.RI [ COMMAND ]
.SH DESCRIPTION
weft serves models of this machine, of others and of providers at one HTTP address.
Start a mesh with
.BR "weft up" ,
and chat with a model with
.BR "weft chat" .
.B weft help COMMAND
lists the options of a command, with an example."""
_REST = """\
.SH EXIT STATUS
.TP
.B 0
Success.
.TP
.B 1
The command failed.
.TP
.B 2
An argument is invalid.
.TP
.B 3
Not found.
.TP
.B 4
Conflict: it exists, is in use or was changed.
.TP
.B 5
Timeout.
.TP
.B 130
Interrupted by Ctrl\\-C.
.SH ENVIRONMENT
.TP
.B WEFT_HOME
Home folder of the mesh: state, sockets and logs.
.TP
.B WEFT_URL
HTTP address of a mesh elsewhere.
.TP
.B WEFT_API_KEY
API key for the mesh.
.TP
.B NO_COLOR
If set, nothing is printed in color.
.SH FILES
.TP
.I ~/.weft
Default home folder.
.TP
.I weft.yaml
Configuration, in the folder of
.BR "weft up" ."""


def man_page(version: str) -> str:
    """Returns the page in the man macros of roff."""
    return "\n".join([f'.TH WEFT 1 "" "weft {version}"', _INTRODUCTION, *_commands(), _REST]) + "\n"


def _commands() -> Iterator[str]:
    of_extensions = {hook.words: hook.summary for each in own_extensions() for hook in each.commands}
    for panel, commands in PANELS.items():
        yield f".SH {panel.upper()}"
        for name, summary in commands.items():
            own = {f"{name} {each}": text for each, text in GROUPS.get(name, {}).items()}
            own |= {words: text for words, text in of_extensions.items() if words.startswith(f"{name} ")}
            yield from _described({name: summary} | own)
    core = {name for names in PANELS.values() for name in names}
    yield ".SH EXTENSIONS"
    yield from _described({words: text for words, text in of_extensions.items() if words.split()[0] not in core})


def _described(commands: Mapping[str, str]) -> Iterator[str]:
    return (f".TP\n.B weft {_escaped(words)}\n\\&{_escaped(text)}" for words, text in commands.items())


def _escaped(text: str) -> str:
    """Returns text for roff, with hyphens that can be copied."""
    return text.replace("\\", "\\e").replace("-", "\\-")
