"""`weft chat`: a conversation on the terminal, its history under the home, and the notices that an answer carries.

Notices are signals, warnings and tools that the mesh runs for the answer, one line each.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from weft.api.common.v1 import event_pb2, json_value_pb2, receipt_pb2
from weft.client import ChatOptions, Mesh, Message, WeftError, connect
from weft.client.tasks import connect_tasks
from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.durable.tasks import state_name
from weft.kernel.alias_rules import matches
from weft.kernel.errors import COMPLETION_TOKENS, PROMPT_TOKENS, invalid_field
from weft.kernel.json_objects import plain_object
from weft.kernel.names import require_name, require_name_of_model
from weft.kernel.reasons import Reason
from weft.kernel.units import wait_words
from weft.kernel.unknown_names import unknown_target
from weft_app.cli.chat_media import AudioOption, ImageOption, MessageMedia, read_media
from weft_app.cli.completion import complete_chat_target
from weft_app.cli.formats import source_word
from weft_app.cli.mesh_documents import Document, MeshDocuments, connect_documents
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.output import safe_text, shown
from weft_app.cli.usage_text import has_tokens, work_parts

MAX_SHOWN_CHARS = 160
"""Longest text shown of a signal's or tool's arguments and of a tool's result."""


def notice(event: event_pb2.InferenceEvent) -> str:
    """Returns the notice line of an event; empty for an event that is no notice."""
    match event.WhichOneof("event"):
        case "signal":
            return f"signal {event.signal.name}{_arguments(event.signal.arguments)}"
        case "warning":
            return f"warning: {event.warning.message}"
        case "tool_call":
            return f"tool {event.tool_call.name}{_arguments(event.tool_call.arguments)}"
        case "tool_result":
            outcome = "failed" if event.tool_result.failed else "answered"
            return f"tool {outcome}: {_cut(event.tool_result.content)}"
        case _:
            return ""


def _arguments(arguments: json_value_pb2.JsonObject) -> str:
    given = plain_object(arguments)
    return f" {_cut(json.dumps(given, ensure_ascii=False))}" if given else ""


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[: MAX_SHOWN_CHARS - 1]}…"


MAX_HISTORY_LINES = 1000
HISTORY_NAME = "chat_history"


@contextmanager
def prompt_history(home: Path) -> Iterator[None]:
    """Line editing with a stored history; plain input without readline or without a folder for it."""
    try:
        import readline  # noqa: PLC0415 - not there on every Python
    except ImportError:
        yield
        return
    file = home.expanduser().absolute() / "state" / HISTORY_NAME
    readline.clear_history()
    readline.set_auto_history(True)
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(MAX_HISTORY_LINES)
        # The history is private: readable by its owner only.
        with suppress(OSError):
            file.touch(mode=0o600)
            readline.write_history_file(file)


AGENT_PREFIX = "agent/"
ROUTE_PREFIX = "route/"
QUIT_WORDS = frozenset({"/quit", "/exit", "/bye"})
HELP = "/clear forgets the conversation, /history shows it, /quit or Ctrl-D leaves; Ctrl-C stops an answer."
PROMPT = "> "
RULE_CHARS = 57
MAX_TIMEOUT_SECONDS = 86_400.0
MAX_PIPED_BYTES = 10 * 1024 * 1024
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_PREFIXES = MappingProxyType({AGENT_PREFIX: ResourceKind.AGENT, ROUTE_PREFIX: ResourceKind.ROUTE})
_PREFIX_OF: Mapping[str, str] = {ResourceKind.AGENT: AGENT_PREFIX, ResourceKind.ROUTE: ROUTE_PREFIX}
_KINDS = (ResourceKind.MODEL, ResourceKind.POOL, ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS)
_MISSING = frozenset({Reason.NOT_FOUND, Reason.MODEL_NOT_FOUND})


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also show who answers, and the whole receipt of each answer.")
]


def chat(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A model, a pool, an agent (agent/NAME) or a route (route/NAME).",
            autocompletion=complete_chat_target,
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="Send this one message and exit.", show_default=False)
    ] = None,
    message: Annotated[str | None, typer.Option("--message", "-m", help="The same as PROMPT.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    *,
    image: ImageOption = None,
    audio: AudioOption = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="Whether the model reasons first. Default: the model's own."),
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow remote models and tools: those outside your machines.")
    ] = False,
    in_background: Annotated[
        bool,
        typer.Option(
            "--async", help="Submit PROMPT as a durable task, print its id, and exit; the model may be unavailable."
        ),
    ] = False,
    wait_for_model: Annotated[
        bool,
        typer.Option("--wait-for-model", help="With --async: accept a model that does not exist yet, and wait for it."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_TIMEOUT_SECONDS, help="Deadline of one answer in seconds.")
    ] = 600.0,
    verbose: VerboseOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Chat with a model, pool, agent or route. The answer goes to stdout, everything else to stderr.

    The line behind an answer ends with the id of the request, for weft explain. Files go with the first message.

    Example: weft chat smollm2-135m "Why is the sky blue?"

    Example: weft chat gemma "What is this?" --image photo.jpg
    """
    if prompt is not None and message is not None:
        raise invalid_field("--message", "is the same as PROMPT; give one of them")
    options: ChatOptions = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if thinking is not None:
        options["thinking"] = thinking
    if allow_remote:
        options["allow_remote"] = True
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    media = read_media(image, audio)
    field = "PROMPT" if prompt is not None else "--message"
    once = only_message(prompt if prompt is not None else message, field, "; give it behind NAME, or pipe it in")
    if in_background:
        submit(name, once, history, options, home, media=media, wait_for_model=wait_for_model)
        return
    with connect(home=home) as mesh:
        asked, header = resolve(name, home)
        sys.stderr.write(header if verbose else "")
        conversation = Conversation(mesh, asked, history, options, timeout, media=media, is_verbose=verbose)
        if once is not None:
            conversation.say(once)
            return
        with prompt_history(home):
            converse(conversation)


def submit(
    name: str,
    text: str | None,
    history: list[Message],
    options: ChatOptions,
    home: Path,
    *,
    media: MessageMedia,
    wait_for_model: bool = False,
) -> None:
    """Submit one message as a durable task: its id on stdout, everything else on stderr."""
    if text is None:
        raise invalid_field("--async", "needs -m, or a message on standard input")
    asked = name_for_task(name, home, wait_for_model=wait_for_model)
    with connect_tasks(home=home) as tasks:
        task = tasks.submit_chat(asked, [*history, media.message(text)], wait_for_model=wait_for_model, **options)
    sys.stdout.write(f"{task.id}\n")
    sys.stdout.flush()
    state = state_name(task.state).lower()
    _aside(f"{state}; `weft logs task/{task.id} -f` prints its answer, `weft wait task {task.id}` waits for it")


def name_for_task(name: str, home: Path, *, wait_for_model: bool) -> str:
    """Returns the target as `resolve` does; with `wait_for_model` it need not exist yet."""
    try:
        return resolve(name, home)[0]
    except WeftError as error:
        if error.reason not in _MISSING:
            raise
        if not wait_for_model:
            end = "" if error.message.endswith("?") else ";"
            hint = f"{error.message}{end} --wait-for-model accepts a task for a model that does not exist yet"
            raise WeftError(error.reason, hint, metadata=error.metadata) from error
        _aside(f"no runner serves {name} yet; the task waits for it")
        return name


def only_message(message: str | None, field: str, remedy: str = "") -> str | None:
    """Returns the single message that was given or piped in; None for an interactive chat.

    Raises INVALID_ARGUMENT naming `field` for an empty one.
    """
    if message is None and sys.stdin.isatty():
        return None
    text = message if message is not None else sys.stdin.buffer.read(MAX_PIPED_BYTES + 1).decode("utf-8", "replace")
    if len(text) > MAX_PIPED_BYTES:
        raise WeftError(Reason.REQUEST_TOO_LARGE, f"standard input is larger than {MAX_PIPED_BYTES // 1024**2} MiB")
    if not text.strip():
        raise invalid_field(field, f"the message is empty{remedy}")
    return text


def resolve(name: str, home: Path) -> tuple[str, str]:
    """Returns the target to request and its description as text; the bare name of an agent or a route is enough.

    Where the registry cannot be reached, `name` is used as it is: the router resolves it.
    """
    if (bare := _without_prefix(name)) == name:
        name = require_name_of_model(name, "NAME")
    else:
        require_name(bare, "NAME")
    try:
        with connect_documents(home) as mesh:
            try:
                found = _find(mesh, name)
            except WeftError as error:
                if error.reason not in _MISSING:
                    raise
                raise unknown_target(name, _targets(mesh)) from error
    except WeftError as error:
        if error.reason is Reason.MODEL_NOT_FOUND:
            raise
        return name, ""
    # An alias may stand for many names, and which one a tenant means is for the router to say.
    asked = name if found["kind"] == ResourceKind.ALIAS else f"{_PREFIX_OF.get(found['kind'], '')}{found['name']}"
    return asked, header_of(found)


def _without_prefix(name: str) -> str:
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


def _targets(mesh: MeshDocuments) -> set[str]:
    """Returns all that requests can name."""
    return {f"{_PREFIX_OF.get(kind, '')}{name}" for kind in _KINDS for name in mesh.names(kind)}


def header_of(document: Document) -> str:
    """Returns the heading above an answer: who answers, between two rules."""
    rule = "─" * RULE_CHARS
    return f"{rule}\n{_who(document)}\n{rule}\n"


def _find(mesh: MeshDocuments, name: str) -> Document:
    for prefix, kind in _PREFIXES.items():
        if name.startswith(prefix):
            return mesh.document(kind, name.removeprefix(prefix))
    for kind in (ResourceKind.MODEL, ResourceKind.POOL, ResourceKind.AGENT):
        try:
            return mesh.document(kind, name)
        except WeftError as error:
            if error.reason not in _MISSING:
                raise
    alias = next((each for each in mesh.documents(ResourceKind.ALIAS) if matches(each["pattern"], name)), None)
    return alias or mesh.document(ResourceKind.ROUTE, name)


def _who(document: Document) -> str:
    name, status = document["name"], document["status"]
    state = f"Status: {status.get('state', '')}"
    about = f"\n{safe_text(document['description'])}" if document.get("description") else ""
    match document["kind"]:
        case ResourceKind.MODEL:
            pool = f" (pool {status['pool']})" if document.get("poolName") else ""
            return f"Model: {name}{pool}\nSource: {source_word(status['kind'])}  {state}"
        case ResourceKind.AGENT:
            target = f"pool {document['pool']}" if document.get("pool") else f"model {document.get('model', '')}"
            return f"Agent: {name} → {target}\nSource: {source_word(status['kind'])}  {state}{about}"
        case ResourceKind.ROUTE:
            return f"Route: {name} → {', '.join(document['candidates'])}\n{state}{about}"
        case ResourceKind.ALIAS:
            return f"Alias: {document['pattern']} → {document['target']}"
        case _:
            return f"Pool: {name}\nMembers: {status['size']} ({status['activeCount']} active)"


def converse(conversation: "Conversation") -> None:
    """Reads and answers turn by turn until the user leaves."""
    sys.stderr.write(f"{HELP}\n")
    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            sys.stderr.write("\n")
            return
        except KeyboardInterrupt:
            # Often a Ctrl-C that came too late to stop an answer; it must not cost the conversation.
            sys.stderr.write("\n")
            continue
        if text in QUIT_WORDS:
            return
        if text.startswith("/"):
            _command(text, conversation)
        elif text:
            _turn(text, conversation)


def _command(text: str, conversation: "Conversation") -> None:
    match text:
        case "/clear":
            conversation.clear()
            sys.stderr.write("forgotten\n")
        case "/history":
            for turn in conversation.turns():
                sys.stderr.write(f"{turn['role']}: {shown(turn['content'])}\n")
        case _:
            sys.stderr.write(f"{HELP}\n")


def _turn(text: str, conversation: "Conversation") -> None:
    try:
        conversation.say(text)
    except KeyboardInterrupt:
        sys.stderr.write("\n[stopped]\n")
    except WeftError as error:
        sys.stderr.write(f"weft: {error.message}\n")


class Conversation:
    """The turns of one chat; answers are streamed to the terminal."""

    def __init__(
        self,
        mesh: Mesh,
        model: str,
        history: list[Message],
        options: ChatOptions,
        timeout_seconds: float,
        *,
        media: MessageMedia | None = None,
        is_verbose: bool = False,
    ) -> None:
        self._is_verbose = is_verbose
        self._media = media or MessageMedia()
        """Files of the next message."""
        self._mesh = mesh
        self._model = model
        self._history = history
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._inside_line = False

    def turns(self) -> list[Message]:
        """Returns the conversation so far, without answers that were stopped."""
        return list(self._history)

    def clear(self) -> None:
        """Clears the conversation and keeps the system prompt."""
        self._history[:] = [turn for turn in self._history if turn["role"] == "system"]

    def say(self, text: str) -> None:
        """Sends a message and prints the answer with its timings."""
        self._inside_line = False
        turns: list[Message] = [*self._history, self._media.message(text)]
        answer: list[str] = []
        events = self._mesh.chat(self._model, turns, timeout=self._timeout_seconds, **self._options)
        try:
            for event in events:
                self._show(event, answer)
        except WeftError as error:
            self._show_cost(error)
            if error.reason is not Reason.DEADLINE_EXCEEDED:
                raise
            late = f"the answer took longer than {self._timeout_seconds:g} s; --timeout allows more"
            raise WeftError(error.reason, late, metadata=error.metadata) from error
        self._history[:] = [*turns, {"role": "assistant", "content": "".join(answer)}]
        self._media = MessageMedia()

    def _show(self, event: event_pb2.InferenceEvent, answer: list[str]) -> None:
        match event.WhichOneof("event"):
            case "delta":
                self._print(event.delta.text)
                answer.append(event.delta.text)
            case "queued":
                _aside(f"queued, position {event.queued.position}: {event.queued.reason}")
            case "loading":
                _aside(f"loading{_progress(event.loading)}: {event.loading.stage}")
            case "signal" | "warning" | "tool_call" | "tool_result":
                if self._inside_line and sys.stdout.isatty() and sys.stderr.isatty():
                    # On a terminal the two are one text; where stdout and stderr are apart, the answer stays as it
                    # came.
                    sys.stderr.write("\n")
                    self._inside_line = False
                _aside(notice(event))
            case "finished":
                sys.stdout.write("\n")
                sys.stdout.flush()
                self._show_receipt(event.finished.receipt)

    def _show_receipt(self, receipt: receipt_pb2.Receipt) -> None:
        _aside(timings(receipt))
        if not self._is_verbose:
            return
        from weft_app.cli.explain import receipt_lines  # noqa: PLC0415 - for this flag alone

        if receipt.request_id:
            _aside(f"weft explain {receipt.request_id}")
        for line in receipt_lines(document_of(receipt)):
            _aside(line)

    def _show_cost(self, error: WeftError) -> None:
        """Prints the cost of an answer that was stopped, where it is known."""
        if not {PROMPT_TOKENS, COMPLETION_TOKENS} <= error.metadata.keys():
            return
        if self._inside_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        _aside(f"{error.metadata[PROMPT_TOKENS]} + {error.metadata[COMPLETION_TOKENS]} tokens until it was stopped")

    def _print(self, text: str) -> None:
        if text:
            sys.stdout.write(shown(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            self._inside_line = not text.endswith("\n")


def _progress(loading: event_pb2.Loading) -> str:
    share = f" {loading.progress:.0%}" if loading.HasField("progress") else ""
    left = f", {wait_words(loading.eta.ToNanoseconds() / 1e9)} s left" if loading.HasField("eta") else ""
    return f"{share}{left}"


def _aside(text: str) -> None:
    """Prints text that is not part of the answer, dimmed on a terminal."""
    line = safe_text(text)
    sys.stderr.write(f"{DIM}{line}{PLAIN}\n" if sys.stderr.isatty() else f"{line}\n")
    sys.stderr.flush()


def timings(receipt: receipt_pb2.Receipt) -> str:
    """Returns one line: tokens, speed, time to first token, waits, the runner, and the request's id.

    Unknown values are left out.
    """
    usage = receipt.usage
    first = receipt.time_to_first_token.ToNanoseconds() / 1e9
    queue = receipt.queue_wait.ToNanoseconds() / 1e9
    load = receipt.load_wait.ToNanoseconds() / 1e9
    is_counted = receipt.HasField("usage") and has_tokens(document_of(usage))
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"] if is_counted else []
    parts += work_parts(document_of(usage))
    if receipt.tokens_per_second:
        parts.append(f"{receipt.tokens_per_second:.{0 if receipt.tokens_per_second >= 10 else 1}f} tokens/s")
    if receipt.HasField("time_to_first_token"):
        parts.append(f"first token {first:.2f} s")
    parts.append(f"queue {queue:.2f} s")
    if load:
        parts.append(f"load {load:.2f} s")
    if usage.cached_prompt_tokens:
        parts.append(f"{usage.cached_prompt_tokens} cached")
    parts.append(f"{receipt.attempts[-1].runner} on {receipt.host}")
    if receipt.request_id:
        parts.append(f"request {receipt.request_id}")
    return ", ".join(parts)
