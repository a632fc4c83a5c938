"""The entry point: loads and runs the commands of `weft_app.cli.commands`.

Each command is imported when it runs: `weft get` imports no service, `weft --help` no command.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from enum import Enum
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group
from typer.models import ParameterInfo
from typing_extensions import override

from weft import __version__
from weft.kernel.machine.memory_tuning import collect_rarely
from weft_app.cli.commands import ALIASES, COMMANDS, EXAMPLES, GROUPS, OTHER_WORDS, PANELS, SUBCOMMAND_ALIASES
from weft_app.cli.inherited import failures_of_system_in_one_line, make_usable
from weft_app.cli.terminal import note, say

# gRPC reads this on import. Its own log lines beside a command's errors do not help users.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


PANEL_OF_EXTENSIONS = "Extensions"
"""Panel of `weft --help` with the commands of extensions that belong to no group of the core."""


class CommandGroup(TyperGroup):
    """A group with own commands, and those of COMMANDS and of extensions below `path`, each imported when it runs."""

    path = ""
    """The words after `weft`."""
    listed: frozenset[str] = frozenset()
    """Names of the commands that are imported when they run."""

    def add_listed(self, names: Mapping[str, str], panel: str | None = None) -> None:
        """Adds commands with their names and summaries for help and completion."""
        self.listed |= names.keys()
        self.commands.update(
            (name, TyperCommand(name, help=summary, rich_help_panel=panel)) for name, summary in names.items()
        )

    def add_of_extensions(self) -> None:
        """Adds the commands of extensions, which a listed command does not need."""
        from weft_app.cli.extension_commands import extension_commands  # noqa: PLC0415 - see above

        paths = ((words.rpartition(" "), hook.summary) for words, hook in extension_commands().items())
        listed = {name: summary for (group, _, name), summary in paths if group == self.path}
        panel = None if self.path else PANEL_OF_EXTENSIONS
        self.add_listed({name: listed[name] for name in listed if name not in self.commands}, panel)

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        self.add_of_extensions()
        return super().list_commands(ctx)

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Also accepts SUBCOMMAND_ALIASES, and says why a command was removed or is off."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            from weft.kernel.errors.removed_features import removed_command  # noqa: PLC0415 - the help imports none of it
            from weft_app.cli.extension_commands import off_command  # noqa: PLC0415 - as above

            self.add_of_extensions()
            path = f"{self.path} {args[0]}".strip()
            if refused := removed_command(path) or (args[0] not in self.commands and off_command(path)):
                ctx.fail(refused)
            meant = [each for each in SUBCOMMAND_ALIASES.get(args[0], ()) if each in self.commands]
            args = [*meant[:1], *args[1:]] if meant else args
        word, listed, rest = super().resolve_command(ctx, args)
        if word not in self.listed:
            return word, listed, rest
        path = f"{self.path} {word}".strip()
        return word, (ctx.resilient_parsing and _completed(path, rest)) or load(path), rest


class WeftGroup(CommandGroup):
    """The commands of PANELS."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        without_conversion(self)
        for panel, names in PANELS.items():
            self.add_listed(names, panel)

    @override
    def main(self, *args: Any, **options: Any) -> Any:
        make_usable()
        with failures_of_system_in_one_line():
            return super().main(*args, **options)

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Also accepts `weft help COMMAND`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"] if args[1:2] != ["help"] else ["--help"]
        return super().parse_args(ctx, args)

    @override
    def make_context(self, *args: Any, **extra: Any) -> Any:
        with usage_errors_in_one_line():
            return super().make_context(*args, **extra)

    @override
    def invoke(self, ctx: Any) -> Any:
        """Runs a command. An error prints one line and sets the exit code of its reason."""
        from weft_app.cli.options import reporting  # noqa: PLC0415 - every command imports it, the help does not

        with usage_errors_in_one_line(), reporting():
            return super().invoke(ctx)

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Also accepts ALIASES."""
        if args:
            word, *rest = args
            is_bare_list = ALIASES.get(word) == "get" and (not rest or rest[0].startswith("-"))
            args = [ALIASES.get(word, word), *(["models"] if is_bare_list else []), *rest]
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            from weft_app.cli.extension_commands import off_command  # noqa: PLC0415 - the help imports little

            self.add_of_extensions()
            if args[0] not in self.commands:
                ctx.fail(off_command(args[0]) or _no_command(args[0]))
        return super().resolve_command(ctx, args)


def _no_command(word: str) -> str:
    """Returns the error for an unknown command, with its equivalents or similar commands."""
    from weft_app.cli.extension_commands import extension_commands  # noqa: PLC0415 - the help imports little

    meant = OTHER_WORDS.get(word)
    if meant is not None:
        return f"there is no command {word}; use: {meant}"
    paths = dict[str, list[str]]()
    for path in (*COMMANDS, *extension_commands()):
        paths.setdefault(path.rpartition(" ")[2], []).append(path)
    close = [path for name in ([word] if word in paths else get_close_matches(word, paths)) for path in paths[name]]
    return f"there is no command {word}" + (f"; did you mean {' or '.join(close)}?" if close else "; see weft --help")


_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])
"""Base of typer's errors about arguments; it comes from click in some releases of typer."""


@contextmanager
def usage_errors_in_one_line() -> Iterator[None]:
    """Prints typer's errors about arguments in weft's format, and exits with their code."""
    try:
        yield
    except _USAGE_ERROR as error:
        # A group without a subcommand prints its help by raising such an error.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        note(_usage_text(error))
        raise typer.Exit(error.exit_code) from None


_OF_MOST_COMMANDS = ("--home", "--output", "--config", "--watch")
"""Options that users also write before the command."""


def _usage_text(error: Any) -> str:
    """Returns a usage error in one line: the invalid value, options similar to a misspelt one, the command for help."""
    command = "weft" if error.ctx is None else error.ctx.command_path
    if hasattr(error, "possibilities"):
        return _no_option(error.option_name, command, error.ctx)
    from weft.kernel.errors.validation_words import plain_words  # noqa: PLC0415 - the help imports none of weft

    error.message = plain_words(error.message)
    text = error.format_message().removesuffix(".")
    text = f"{text[:1].lower()}{text[1:]}"
    return text if "weft" in text or text.endswith("?") else f"{text}; see {command} --help"


def _no_option(option: str, command: str, context: Any) -> str:
    """Returns the error for an unknown option, with similar ones."""
    known = [] if context is None else [word for each in context.command.get_params(context) for word in each.opts]
    is_global = command == "weft"
    offered = [word for word in known if word.startswith("--")] + (list(_OF_MOST_COMMANDS) if is_global else [])
    close = "".join(get_close_matches(option, offered, 1))
    text = f"there is no option {option}" + ("" if is_global else f" for {command}")
    if is_global and close not in known:
        meant = f"; did you mean {close}?" if close else ";"
        return f"{text}{meant} options of a command follow its name: weft COMMAND {close or option}"
    return f"{text}; did you mean {close}?" if close else f"{text}; see {command} --help"


def load(path: str) -> Any:
    """Imports a command of COMMANDS or of an extension, and returns it, ready to run.

    A group's commands of GROUPS and of extensions are not loaded.
    """
    name, (place, summary, example) = path.rpartition(" ")[2], _described(path)
    module, _, attribute = place.partition(":")
    collect_rarely()
    if place:
        commands = import_module(module)
        found = getattr(commands, attribute, None) or commands.app
    else:
        found = typer.Typer()
    if isinstance(found, typer.Typer):
        found.info.cls, found.info.help, found.info.no_args_is_help = CommandGroup, summary, True
        found.info.epilog = f"Example: {example}"
        command: Any = get_group(found)
        command.name = name
    else:
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(name)(found)
        command = get_command(alone)
    for each in (command, *getattr(command, "commands", {}).values()):
        _prepare(each)
    if isinstance(command, CommandGroup):
        command.path = path
        command.add_listed(GROUPS.get(path, {}))
    return command


def _described(path: str) -> tuple[str, str, str]:
    """Returns the place of a command, `module:attribute`, its summary, and the example of a group."""
    if path in COMMANDS:
        place, summary = COMMANDS[path]
        return place and f"weft_app.cli.{place}", summary, EXAMPLES.get(path, "")
    from weft_app.cli.extension_commands import extension_commands  # noqa: PLC0415 - a listed command needs none of it

    hook = extension_commands()[path]
    return hook.place, hook.summary, hook.example


def loaded_commands(path: str, command: Any) -> Mapping[str, Any]:
    """Returns the commands of the group `path` by name, loaded; of another command none."""
    if isinstance(command, CommandGroup):
        command.add_of_extensions()
    listed = getattr(command, "listed", ())
    own = getattr(command, "commands", {})
    return {name: load(f"{path} {name}") if name in listed else each for name, each in own.items()}


def _completed(path: str, words: Sequence[str]) -> Any:
    """Returns a command that completes the next word without the module of `path`; None: this needs the module.

    The module knows the options and which words are values of options.
    """
    line = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split(" ")
    if any(word.startswith("-") for word in line[-2:]):
        return None
    from weft_app.cli.completion import FIRST_WORDS, NAMES  # noqa: PLC0415 - as in WeftGroup.invoke
    from weft_app.cli.options import DEFAULT_HOME, HomeOption  # noqa: PLC0415 - as above

    has_word = bool(words) and not words[0].startswith("-")
    complete = NAMES.get(path) or (None if has_word else FIRST_WORDS.get(path))
    if complete is None:
        return None

    def command(
        resources: Annotated[list[str], typer.Argument(autocompletion=complete)], home: HomeOption = DEFAULT_HOME
    ) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command(path.rpartition(" ")[2], context_settings={"ignore_unknown_options": True})(command)
    found = get_command(alone)
    without_conversion(found)
    return found


def _prepare(command: Any) -> None:
    """Makes a command accept plain values, and report its errors with its options."""
    without_conversion(command)
    if command.help and "\b" not in command.help:
        # Typer keeps the line breaks of the source.
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(command.help))
    typers_own = command.invoke

    def invoke(context: Any) -> Any:
        from weft_app.cli.options import reporting  # noqa: PLC0415 - as in WeftGroup.invoke

        with reporting():
            return typers_own(context)

    command.invoke = invoke


app = typer.Typer(
    name="weft",
    cls=WeftGroup,
    help="One endpoint for all models that you can reach or wake.",
    epilog="Start here: weft up",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"weft {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One endpoint for all models that you can reach or wake."""


_UNKNOWN = object()
_SCALARS = (str, bool, int, float)
_DIGITS = re.compile(r"[0-9]{1,9}")


def without_conversion(command: Any) -> None:
    """Makes a command accept plain values without typer's conversion, which handles all other and invalid values.

    Its help shows no types.
    """
    typers_own = command.get_params

    def get_params(context: Any) -> Any:
        found = typers_own(context)
        for parameter in found:
            # Releases of typer without pydantic lack this method and do not need it.
            known = getattr(parameter, "get_runtime_param", None)
            if known is not None and not isinstance(known, _PlainParameter):
                parameter.get_runtime_param = _PlainParameter(known)
                _show_values_without_types(parameter)
        return found

    # Not only in `params`: the option --help is created on demand.
    command.get_params = get_params


def _show_values_without_types(parameter: Any) -> None:
    """Makes the help show an option's choices or the name of its value, such as FILE, but no type or range."""
    shown = parameter.display_type_rich
    is_named = parameter.type_descriptor.is_choice or (
        parameter.param_type_name == "option" and parameter.metavar is not None
    )
    parameter.display_type_rich = lambda ctx: shown(ctx) if is_named else None
    parameter._get_number_range_help_str = lambda: None  # noqa: SLF001 - typer has no option for it


class _PlainParameter:
    """Replaces typer's converter of a parameter's value."""

    def __init__(self, typers_own: Any) -> None:
        self._typers_own = typers_own

    def __call__(self) -> "_PlainParameter":
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the converted value. Raises typer's errors for an invalid one."""
        plain = _plain(value, param)
        return self._typers_own().coerce(value, param=param, ctx=ctx) if plain is _UNKNOWN else plain


def _plain(value: Any, param: Any) -> Any:
    kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    is_many = param.multiple or param.nargs == -1
    if value is None:
        return () if is_many else None
    if info.parser is not None or getattr(info, "click_type", None) is not None:
        return _UNKNOWN
    if kind == list[str] and is_many and isinstance(value, list | tuple):
        return list(value) if all(type(each) is str for each in value) else _UNKNOWN
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else _UNKNOWN
    return _UNKNOWN if is_many or not isinstance(kind, type) else _plain_one(value, kind, info)


def _plain_one(value: Any, kind: type, info: ParameterInfo) -> Any:
    if issubclass(kind, Enum):
        return next((each for each in kind if value in (each, each.value)), _UNKNOWN)
    if kind is int and type(value) is str and _DIGITS.fullmatch(value):
        value = int(value)
    if kind is Path:
        return Path(value) if _is_usual_path(value, info) else _UNKNOWN
    return value if kind in _SCALARS and type(value) is kind and _is_within(value, info) else _UNKNOWN


def _is_within(value: Any, info: ParameterInfo) -> bool:
    """Whether a number, such as a default, is within its option's bounds."""
    return (info.min is None or value >= info.min) and (info.max is None or value <= info.max)


def _is_usual_path(value: Any, info: ParameterInfo) -> bool:
    """Whether typer would accept a path unchanged: its option has no special checks, and it is missing or readable."""
    is_checked = info.exists or info.writable or info.resolve_path or info.allow_dash or info.path_type is not None
    is_any = info.file_okay and info.dir_okay
    return not is_checked and is_any and (not os.path.lexists(value) or os.access(value, os.R_OK))


if __name__ == "__main__":
    app()
