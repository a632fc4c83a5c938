"""The entry point and the table of commands.

Each command is imported when it runs: `weft get` needs no service, `weft --help` no command.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group
from typing_extensions import override

from weft import __version__
from weft.kernel.memory_tuning import collect_rarely
from weft_app.cli.inherited import failures_of_system_in_one_line, make_usable
from weft_app.cli.plain_values import without_conversion

# gRPC reads it when it is loaded. Its own lines beside the errors of a command, in its own words, help no user.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@dataclass(frozen=True, slots=True)
class CommandPlace:
    """The module of a command, and its line in `weft --help`."""

    place: str
    """"module:attribute" of a function, or of an app with its own commands."""
    summary: str
    """The first paragraph of its help."""


PANELS: Mapping[str, Mapping[str, CommandPlace]] = {
    "Start here": {
        "up": CommandPlace(
            "weft_app.cli.up:up", "Start a mesh on this machine and serve until Ctrl-C, or in the background."
        ),
        "run": CommandPlace(
            "weft_app.cli.run:run",
            "Pull, load and chat with a model, by its name or source. Starts weft for this command if "
            "it is not running.",
        ),
        "stop": CommandPlace(
            "weft_app.cli.stop:stop", "Stop the mesh of a home: running requests are finished first, as with Ctrl-C."
        ),
        "restart": CommandPlace(
            "weft_app.cli.restart:restart",
            "Stop the mesh of a home, finishing running requests first, and start it again as it was started.",
        ),
        "reload": CommandPlace(
            "weft_app.cli.reload:reload",
            "Have a running mesh read its weft.yaml again: what changed drains, all else continues.",
        ),
        "status": CommandPlace(
            "weft_app.cli.status:status",
            "Show whether a mesh runs on a home, since when, where, how its processes are, and which models it serves.",
        ),
        "demo": CommandPlace(
            "weft_app.cli.demo:demo",
            "Start a mesh in a temporary home, stream one chat through its HTTP API, stop it.",
        ),
        "ui": CommandPlace(
            "weft_app.cli.ui:ui", "Open the workbench, the web page of the mesh, and print its address."
        ),
        "chat": CommandPlace(
            "weft_app.cli.chat:chat",
            "Chat with a model, pool, agent or route. The answer goes to stdout, everything else to stderr.",
        ),
        "image": CommandPlace(
            "weft_app.cli.image:image",
            "Make images from a description, or from images, as files. Progress goes to stderr; Ctrl-C cancels.",
        ),
        "transcribe": CommandPlace(
            "weft_app.cli.transcribe:transcribe",
            "Transcribe a recording. Text and captions are streamed, progress goes to stderr; Ctrl-C cancels.",
        ),
        "speak": CommandPlace(
            "weft_app.cli.speak:speak",
            "Speak a text: the recording goes to a file, or to stdout in a pipe. Nothing is played; Ctrl-C cancels.",
        ),
        "launch": CommandPlace(
            "weft_app.cli.launch:launch",
            "Start a program such as Claude Code with the environment that leads it to the mesh; no file is changed.",
        ),
        "doctor": CommandPlace(
            "weft_app.cli.doctor:doctor",
            "Check what a mesh on this machine needs. Exit code 1 when something is missing.",
        ),
        "version": CommandPlace(
            "weft_app.cli.version:show_version",
            "Show the versions of the client, of the running mesh and its runners, of the API, Python and gRPC.",
        ),
    },
    "Models": {
        "discover": CommandPlace(
            "weft_app.cli.discover:discover",
            "Show engines and models of other programs here, the weft.yaml that serves them, and announced meshes.",
        ),
        "attach": CommandPlace(
            "weft_app.cli.attach:attach",
            "Serve every model that a running server lists, without a restart of the mesh; its list is followed.",
        ),
        "detach": CommandPlace(
            "weft_app.cli.attach:detach",
            "Serve the models of an attached server no longer; running requests end first, and the server runs on.",
        ),
        "pull": CommandPlace(
            "weft_app.cli.models:pull",
            "Pull a model: from the Hugging Face hub, by its short name, a URL, or a folder. No mesh needs to run.",
        ),
        "models": CommandPlace("weft_app.cli.models:app", "List and remove the models that were pulled."),
        "ps": CommandPlace(
            "weft_app.cli.ps:ps",
            "Show each model on each runner: memory, how long it stays loaded, process, slots.",
        ),
        "top": CommandPlace(
            "weft_app.cli.top:top",
            "Show devices, models, queue and last ends on one page that continues until q or Ctrl-C.",
        ),
        "figures": CommandPlace(
            "weft_app.cli.figures:figures",
            "Show what was counted in the last hour: requests, tokens, percentiles of times, waits and devices.",
        ),
        "load": CommandPlace(
            "weft_app.cli.operations:load",
            "Load a model, and keep it loaded until it is unloaded. Other settings than the current ones reload it.",
        ),
        "unload": CommandPlace(
            "weft_app.cli.operations:unload",
            "Drain the requests of a model, then unload it; the next request loads it again.",
        ),
        "flush": CommandPlace(
            "weft_app.cli.operations:flush",
            "Drop cached prefixes. Running requests keep theirs until they end.",
        ),
        "estimate": CommandPlace(
            "weft_app.cli.estimate:estimate",
            "Show what memory a model will take, and what the estimate comes from.",
        ),
        "logs": CommandPlace(
            "weft_app.cli.logs:logs",
            "Show the log of the mesh, a service, a runner or one request, a model's engine's output, "
            "or a task's answer.",
        ),
    },
    "Resources": {
        "get": CommandPlace(
            "weft_app.cli.get:get",
            "List resources, requests, clients, tasks, secrets, leases or routers. Resources in YAML "
            "can be applied again.",
        ),
        "describe": CommandPlace(
            "weft_app.cli.describe:describe",
            "Show the details of one resource: its document, conditions with reasons, engines and recent events.",
        ),
        "edit": CommandPlace(
            "weft_app.cli.edit:edit",
            "Edit a resource in $VISUAL or $EDITOR as YAML, and apply it when the editor ends.",
        ),
        "create": CommandPlace("weft_app.cli.create:app", "Create a model of a provider, or a secret."),
        "rotate": CommandPlace("weft_app.cli.create:rotate_app", "Give a secret a new value."),
        "apply": CommandPlace(
            "weft_app.cli.declare:apply",
            "Declare resources. All documents are applied, or none when one is wrong or refused.",
        ),
        "diff": CommandPlace(
            "weft_app.cli.declare:diff",
            "Show what apply would change. Exit code 0: nothing, 1: differences, higher: the comparison failed.",
        ),
        "delete": CommandPlace(
            "weft_app.cli.declare:delete",
            "Delete resources, agents and routes first, finished tasks or secrets. A failure does not stop the others.",
        ),
        "profile": CommandPlace(
            "weft_app.cli.profile:app",
            "Save what is declared and loaded as a profile, and switch to profiles. List them: weft get profiles.",
        ),
        "wait": CommandPlace(
            "weft_app.cli.wait:wait",
            "Wait for a condition of a resource, or for the end of a task. Exit code 5 on timeout.",
        ),
        "events": CommandPlace("weft_app.cli.events:events", "Show recent events, oldest first."),
    },
    "Requests": {
        "explain": CommandPlace(
            "weft_app.cli.explain:explain",
            "Explain the scheduling of a request: what it waited for, which runners could serve it, which one did.",
        ),
        "cancel": CommandPlace(
            "weft_app.cli.cancel:cancel",
            "Cancel requests, tasks, batches or operations: what waits never starts, what runs is "
            "stopped with its engine.",
        ),
        "batch": CommandPlace("weft_app.cli.batch:app", "Submit batches of requests, and fetch their answers."),
        "simulate": CommandPlace(
            "weft_app.cli.simulate:simulate",
            "Simulate a mesh: waits, throughput, refusals and the cost of model swaps.",
        ),
    },
    "Administration": {
        "config": CommandPlace(
            "weft_app.cli.mesh_config:app", "Show the effective weft.yaml; show and change settings of the mesh."
        ),
        "keys": CommandPlace("weft_app.cli.keys:app", "Manage API keys: their scopes and tenants."),
        "runner": CommandPlace(
            "weft_app.cli.runner:app",
            "Join a mesh with the models of this machine, and manage join tokens.",
        ),
        "runtime": CommandPlace(
            "weft_app.cli.runtime:app", "Install, list and remove the environments that engines such as vLLM run in."
        ),
        "lease": CommandPlace(
            "weft_app.cli.lease:app",
            "Lease accelerator memory for a program; list and release the leases of all hosts.",
        ),
        "serve": CommandPlace(
            "weft_app.cli.serve:app",
            "Run one service of a mesh in this process, for meshes that span processes or machines.",
        ),
        "edge": CommandPlace(
            "weft_app.cli.edge:app", "Print the configuration of an Envoy in front of gateways or a relay."
        ),
        "service": CommandPlace(
            "weft_app.cli.service:app",
            "Install, show and remove services of systemd: a mesh, one of its services, a runner.",
        ),
        "health": CommandPlace(
            "weft_app.cli.health:health",
            "Ask the processes of a home whether they can do their work: a probe for containers and supervisors.",
        ),
        "operation": CommandPlace(
            "weft_app.cli.operations:app",
            "List, follow and cancel loads, unloads and flushes.",
        ),
        "audit": CommandPlace(
            "weft_app.cli.audit:app",
            "Show the audit log of loads, unloads and flushes, refusals included, and verify that it is complete.",
        ),
        "usage": CommandPlace(
            "weft_app.cli.usage:usage",
            "Show what tenants, keys and models used: requests, tokens, media, accelerator time, remote requests.",
        ),
        "sign": CommandPlace("weft_app.cli.sign:app", "Sign tokens that permit an operation, and create signing keys."),
        "approve": CommandPlace(
            "weft_app.cli.sign:approve",
            "Show what a token permits, from the signed action itself, and add your signature.",
        ),
        "log-level": CommandPlace(
            "weft_app.cli.log_level:log_level",
            "Change the lowest level that a process of the mesh logs, for a time; then the configured one holds again.",
        ),
    },
    "Development": {
        "conformance": CommandPlace(
            "weft_app.cli.conformance:conformance",
            "Check a runner of the mesh against its contract, promise by promise.",
        ),
    },
}
"""All commands by their panel of `weft --help`, in its order."""
COMMANDS: Mapping[str, CommandPlace] = {name: place for panel in PANELS.values() for name, place in panel.items()}

ALIASES: Mapping[str, str] = {"down": "stop", "show": "describe"}
"""Words that are commands under another name; the help does not list them."""

OTHER_WORDS: Mapping[str, str] = {
    "alias": "weft get aliases, or weft apply -f FILE to declare one",
    "aliases": "weft get aliases",
    "download": "weft pull SOURCE",
    "install": "weft pull SOURCE for a model, weft runtime install NAME for an engine",
    "join": "weft runner join",
    "kill": "weft stop, or weft unload MODEL for one model",
    "list": "weft get models, or weft models ls for the files that were pulled",
    "ls": "weft get models, or weft models ls for the files that were pulled",
    "log": "weft logs, or weft logs MODEL for what its engine printed",
    "remove": "weft models rm NAME for pulled files, weft delete KIND NAME for a resource",
    "rm": "weft models rm NAME for pulled files, weft delete KIND NAME for a resource",
    "start": "weft up",
    "token": "weft runner token, weft keys or weft sign",
    "tokens": "weft runner token, weft keys or weft sign",
}
"""Words that other tools use for a command, and what stands for them here."""


class LazyGroup(TyperGroup):
    """The commands of COMMANDS: listed by their summaries, imported when one runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        without_conversion(self)

    @override
    def main(self, *args: Any, **options: Any) -> Any:
        make_usable()
        with failures_of_system_in_one_line():
            return super().main(*args, **options)

    @override
    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command as help and completion list it: its name and summary. `resolve_command` loads it."""
        command = COMMANDS.get(cmd_name)
        if command is None:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=command.summary, rich_help_panel=_panel_of(cmd_name))

    @override
    def make_context(self, *args: Any, **extra: Any) -> Any:
        with usage_errors_in_one_line():
            return super().make_context(*args, **extra)

    @override
    def invoke(self, ctx: Any) -> Any:
        """Runs a command; its errors become one line and the exit code of their reason."""
        from weft_app.cli.options import reporting  # noqa: PLC0415 - every command imports it, the help does not

        with usage_errors_in_one_line(), reporting():
            return super().invoke(ctx)

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args:
            args = [ALIASES.get(args[0], args[0]), *args[1:]]
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(_no_command(args[0]))
        name, listed, rest = super().resolve_command(ctx, args)
        if name is not None and name in COMMANDS:
            return name, (ctx.resilient_parsing and _completed(name, rest)) or load(name), rest
        return name, listed, rest


def _panel_of(name: str) -> str | None:
    return next((panel for panel, names in PANELS.items() if name in names), None)


def _no_command(word: str) -> str:
    """Returns the refusal of a word that is no command, with its commands here, or those that are close."""
    meant = OTHER_WORDS.get(word)
    if meant is not None:
        return f"there is no command {word}; use: {meant}"
    close = get_close_matches(word, COMMANDS)
    return f"there is no command {word}" + (f"; did you mean {' or '.join(close)}?" if close else "; see weft --help")


_USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0])
"""The base of typer's errors about arguments; some releases of typer take it from click, others have it themselves."""


@contextmanager
def usage_errors_in_one_line() -> Iterator[None]:
    """Prints typer's errors about arguments as all others are printed, and exits with their code."""
    try:
        yield
    except _USAGE_ERROR as error:
        # A group without a subcommand prints its help, also as such an error.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        sys.stderr.write(f"weft: {_usage_text(error)}\n")
        raise typer.Exit(error.exit_code) from None


_OF_MOST_COMMANDS = ("--home", "--output", "--config", "--watch")
"""Options that users write before the command as well."""


def _usage_text(error: Any) -> str:
    """Returns a usage error in one line: what was refused, the options close to a misspelt one, where the help is."""
    command = "weft" if error.ctx is None else error.ctx.command_path
    if hasattr(error, "possibilities"):
        return _no_option(error.option_name, command, error.ctx)
    from weft.kernel.validation_words import plain_words  # noqa: PLC0415 - the help imports none of weft

    error.message = plain_words(error.message)
    text = error.format_message().removesuffix(".")
    text = f"{text[:1].lower()}{text[1:]}"
    return text if "weft" in text or text.endswith("?") else f"{text}; see {command} --help"


def _no_option(option: str, command: str, context: Any) -> str:
    """Returns the refusal of an option that a command does not have, with the close ones."""
    known = [] if context is None else [word for each in context.command.get_params(context) for word in each.opts]
    is_global = command == "weft"
    offered = [word for word in known if word.startswith("--")] + (list(_OF_MOST_COMMANDS) if is_global else [])
    close = "".join(get_close_matches(option, offered, 1))
    text = f"there is no option {option}" + ("" if is_global else f" for {command}")
    if is_global and close not in known:
        meant = f"; did you mean {close}?" if close else ";"
        return f"{text}{meant} options of a command follow its name: weft COMMAND {close or option}"
    return f"{text}; did you mean {close}?" if close else f"{text}; see {command} --help"


def load(name: str) -> Any:
    """Imports a command of COMMANDS and returns it, ready to run."""
    module, _, attribute = COMMANDS[name].place.partition(":")
    collect_rarely()
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        group = get_group(found)
        group.name = name
        _prepare(group)
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(found)
    command = get_command(alone)
    _prepare(command)
    return command


def _completed(name: str, words: Sequence[str]) -> Any:
    """Returns a command that completes the next word without the module of `name`; None: only the module knows it.

    It knows the options, and what is a value of one.
    """
    line = (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split(" ")
    if any(word.startswith("-") for word in line[-2:]):
        return None
    from weft_app.cli.completion import FIRST_WORDS, NAMES  # noqa: PLC0415 - as in LazyGroup.invoke
    from weft_app.cli.options import DEFAULT_HOME, HomeOption  # noqa: PLC0415 - as above

    has_word = bool(words) and not words[0].startswith("-")
    complete = NAMES.get(name) or (None if has_word else FIRST_WORDS.get(name))
    if complete is None:
        return None

    def command(
        resources: Annotated[list[str], typer.Argument(autocompletion=complete)], home: HomeOption = DEFAULT_HOME
    ) -> None: ...

    alone = typer.Typer(add_completion=False)
    alone.command(name, context_settings={"ignore_unknown_options": True})(command)
    found = get_command(alone)
    without_conversion(found)
    return found


def _prepare(command: Any) -> None:
    """Has a command and those below it take plain values, and errors of services name what was typed."""
    without_conversion(command)
    for each in getattr(command, "commands", {}).values():
        _prepare(each)
    typers_own = command.invoke

    def invoke(context: Any) -> Any:
        from weft_app.cli.options import in_words_of_the_command  # noqa: PLC0415 - as in LazyGroup.invoke

        with in_words_of_the_command():
            return typers_own(context)

    command.invoke = invoke


app = typer.Typer(
    name="weft",
    cls=LazyGroup,
    help="One endpoint over every model you can reach or wake.",
    epilog="Start here: weft up",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One endpoint over every model you can reach or wake."""


if __name__ == "__main__":
    app()
