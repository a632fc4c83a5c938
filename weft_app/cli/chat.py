"""`weft chat`: a conversation on the terminal, with its history under the home.

Notices of an answer are signals, warnings and tools that the mesh runs for it, one line each.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

import typer

from weft.api.common.v1 import event_pb2, json_value_pb2, receipt_pb2
from weft.client import ChatOptions, Mesh, Message, WeftError, connect
from weft.client.tasks import connect_tasks
from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.durable.tasks import state_name
from weft.kernel.errors.error_tree import COMPLETION_TOKENS, PROMPT_TOKENS, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_objects import plain_object
from weft.kernel.values.media_types import AUDIO_FORMATS, audio_type_of, image_type_of
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, matches, require_name, require_name_of_model
from weft.kernel.values.units import time_words, wait_words
from weft.kernel.values.unknown_names import unknown_target
from weft_app.cli.completion import complete_chat_target
from weft_app.cli.explain import has_tokens, receipt_lines, work_parts
from weft_app.cli.mesh_api import Document, MeshApi
from weft_app.cli.mesh_api import connect as connect_api
from weft_app.cli.options import DEFAULT_HOME, HomeOption
from weft_app.cli.output import shortened, source_word
from weft_app.cli.targets import MISSING
from weft_app.cli.terminal import DIM, is_err_terminal, is_out_terminal, note, safe_text, say, say_answer, tell

MAX_FILE_BYTES = 20 * 1024 * 1024
MAX_TOTAL_BYTES = 40 * 1024 * 1024
"""Maximum size of all files of a message, which are sent in one request."""
MAX_SHOWN_CHARS = 160
"""Maximum shown length of arguments of signals and tools, and of tool results."""
MAX_HISTORY_LINES = 1000
HISTORY_NAME = "chat_history"
QUIT_WORDS = frozenset({"/quit", "/exit", "/bye"})
HELP = "/clear starts a new conversation, /history shows it, /quit or Ctrl-D exits; Ctrl-C stops an answer."
PROMPT = "> "
RULE_CHARS = 57
MAX_TIMEOUT_SECONDS = 86_400.0
MAX_PIPED_BYTES = 10 * 1024 * 1024
_IMAGES, _AUDIO = "--image", "--audio"
_PREFIX_OF: Mapping[str, str] = MappingProxyType({ResourceKind.AGENT: AGENT_PREFIX, ResourceKind.ROUTE: ROUTE_PREFIX})
_KINDS = (ResourceKind.MODEL, ResourceKind.POOL, ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS)

ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        _IMAGES, metavar="FILE", help="Image to send with the message: PNG, JPEG, WebP, GIF or BMP; repeatable."
    ),
]
AudioOption = Annotated[
    list[Path] | None,
    typer.Option(_AUDIO, metavar="FILE", help=f"Recording to send with the message: {AUDIO_FORMATS}; repeatable."),
]
SystemOption = Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")]
MaxTokensOption = Annotated[int | None, typer.Option(min=1, help="Maximum tokens per answer.")]
TemperatureOption = Annotated[float | None, typer.Option(min=0, max=2, help="Sampling temperature; 0: greedy.")]
ThinkingOption = Annotated[
    bool | None,
    typer.Option("--thinking/--no-thinking", help="Whether the model thinks before it answers. Default: the model's."),
]
TimeoutOption = Annotated[
    float, typer.Option(min=0.001, max=MAX_TIMEOUT_SECONDS, help="Deadline of one answer in seconds.")
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Also show which model answers, and the complete receipt of each answer."),
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
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    *,
    image: ImageOption = None,
    audio: AudioOption = None,
    thinking: ThinkingOption = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow remote models and tools (outside your own machines).")
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
    timeout: TimeoutOption = 600.0,
    verbose: VerboseOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Chat with a model, pool, agent or route. The answer goes to stdout, everything else to stderr.

    The line after an answer ends with the request id, for weft explain. Files are sent with the first message.

    Example: weft chat smollm2-135m "Why is the sky blue?"

    Example: weft chat gemma "What is this?" --image photo.jpg
    """
    if prompt is not None and message is not None:
        raise invalid_field("--message", "is the same as PROMPT; give one of them")
    options = chat_options(max_tokens, temperature, thinking, allow_remote=allow_remote)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    media = read_media(image, audio)
    field = "PROMPT" if prompt is not None else "--message"
    once = only_message(prompt if prompt is not None else message, field, "; give it behind NAME, or pipe it in")
    if in_background:
        _submit(name, once, history, options, home, media=media, wait_for_model=wait_for_model)
        return
    with connect(home=home) as mesh:
        asked, header = resolve(name, home)
        tell(header if verbose else "")
        Conversation(mesh, asked, history, options, timeout, media=media, is_verbose=verbose).run(once, home)


def chat_options(
    max_tokens: int | None, temperature: float | None, thinking: bool | None, *, allow_remote: bool = False
) -> ChatOptions:
    """Returns the given options."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "thinking": thinking}
    options: Any = {name: value for name, value in given.items() if value is not None}
    found: ChatOptions = options | ({"allow_remote": True} if allow_remote else {})
    return found


class MessageMedia(TypedDict, total=False):
    """The files of one message."""

    images: Sequence[bytes]
    audio: Sequence[bytes]


def user_message(text: str, media: MessageMedia) -> Message:
    """Returns a user message with files."""
    return {"role": "user", "content": text, **media}


def read_media(images: Iterable[Path] | None, audio: Iterable[Path] | None) -> MessageMedia:
    """Reads the files of a message. Raises INVALID_ARGUMENT naming the option."""
    found: MessageMedia = {}
    if images:
        found["images"] = [_read(path, _IMAGES) for path in images]
    if audio:
        found["audio"] = [_read(path, _AUDIO) for path in audio]
    if sum(map(len, (*found.get("images", ()), *found.get("audio", ())))) > MAX_TOTAL_BYTES:
        option = _IMAGES if images else _AUDIO
        raise invalid_field(option, f"the files are larger than {MAX_TOTAL_BYTES // 1024**2} MiB together")
    return found


def _read(path: Path, option: str) -> bytes:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise invalid_field(option, f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise invalid_field(option, f"{path} is larger than {MAX_FILE_BYTES // 1024**2} MiB")
    if option == _IMAGES and image_type_of(data) is None:
        raise invalid_field(option, f"{path} is not a PNG, JPEG, WebP, GIF or BMP file")
    if option == _AUDIO and audio_type_of(data) is None:
        raise invalid_field(option, f"{path} is not a {AUDIO_FORMATS} file")
    return data


def only_message(message: str | None, field: str, remedy: str = "") -> str | None:
    """Returns the given or piped message; None for an interactive chat.

    Raises INVALID_ARGUMENT naming `field` if it is empty.
    """
    if message is None and sys.stdin.isatty():
        return None
    piped = b"" if message is not None else sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(piped) > MAX_PIPED_BYTES:
        raise WeftError(Reason.REQUEST_TOO_LARGE, f"standard input is larger than {MAX_PIPED_BYTES // 1024**2} MiB")
    text = piped.decode("utf-8", "replace") if message is None else message
    if not text.strip():
        raise invalid_field(field, f"the message is empty{remedy}")
    return text


def _submit(
    name: str,
    text: str | None,
    history: list[Message],
    options: ChatOptions,
    home: Path,
    *,
    media: MessageMedia,
    wait_for_model: bool,
) -> None:
    """Submits a message as a durable task. Prints the id to stdout and everything else to stderr."""
    if text is None:
        raise invalid_field("--async", "needs -m, or a message on standard input")
    asked = name_for_task(name, home, wait_for_model=wait_for_model)
    with connect_tasks(home=home) as tasks:
        task = tasks.submit_chat(asked, [*history, user_message(text, media)], wait_for_model=wait_for_model, **options)
    say(f"{task.id}\n")
    state = state_name(task.state).lower()
    _aside(f"{state}; `weft logs task/{task.id} -f` prints its answer, `weft mesh wait task {task.id}` waits for it")


def name_for_task(name: str, home: Path, *, wait_for_model: bool) -> str:
    """Returns the target of `resolve`; with `wait_for_model` it need not exist yet."""
    try:
        return resolve(name, home)[0]
    except WeftError as error:
        if error.reason not in MISSING:
            raise
        if not wait_for_model:
            end = "" if error.message.endswith("?") else ";"
            hint = f"{error.message}{end} use --wait-for-model to accept a task for a model that does not exist yet"
            raise WeftError(error.reason, hint, metadata=error.metadata) from error
        _aside(f"no runner serves {name} yet; the task waits for it")
        return name


def resolve(name: str, home: Path) -> tuple[str, str]:
    """Returns the target to request and its description as text. The prefix of an agent or route may be omitted.

    If the registry cannot be reached, returns `name` unchanged: the router resolves it.
    """
    if (bare := name.removeprefix(AGENT_PREFIX).removeprefix(ROUTE_PREFIX)) == name:
        name = require_name_of_model(name, "NAME")
    else:
        require_name(bare, "NAME")
    try:
        with connect_api(home) as mesh:
            try:
                found = _find(mesh, name)
            except WeftError as error:
                if error.reason not in MISSING:
                    raise
                targets = {f"{_PREFIX_OF.get(kind, '')}{each}" for kind in _KINDS for each in mesh.names(kind)}
                raise unknown_target(name, targets) from error
    except WeftError as error:
        if error.reason is Reason.MODEL_NOT_FOUND:
            raise
        return name, ""
    # The target of an alias may depend on the tenant, so the router resolves it.
    asked = name if found["kind"] == ResourceKind.ALIAS else f"{_PREFIX_OF.get(found['kind'], '')}{found['name']}"
    rule = "─" * RULE_CHARS
    return asked, f"{rule}\n{_who(found)}\n{rule}\n"


def _find(mesh: MeshApi, name: str) -> Document:
    for kind in (ResourceKind.AGENT, ResourceKind.ROUTE):
        if name.startswith(_PREFIX_OF[kind]):
            return mesh.document(kind, name.removeprefix(_PREFIX_OF[kind]))
    for kind in (ResourceKind.MODEL, ResourceKind.POOL, ResourceKind.AGENT):
        try:
            return mesh.document(kind, name)
        except WeftError as error:
            if error.reason not in MISSING:
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


@contextmanager
def prompt_history(home: Path) -> Iterator[None]:
    """Enables line editing with a stored history; plain input without readline or a folder for the history."""
    try:
        import readline  # noqa: PLC0415 - missing in some Pythons
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
        # The history is private.
        with suppress(OSError):
            file.touch(mode=0o600)
            readline.write_history_file(file)


def converse(conversation: "Conversation") -> None:
    """Answers messages until the user leaves."""
    tell(f"{HELP}\n")
    while True:
        try:
            text = input(PROMPT).strip()
        except EOFError:
            tell("\n")
            return
        except KeyboardInterrupt:
            # A Ctrl-C that was too late to stop an answer must not end the conversation.
            tell("\n")
            continue
        if text in QUIT_WORDS:
            return
        if text:
            _turn(text, conversation)


def _turn(text: str, conversation: "Conversation") -> None:
    match text:
        case "/clear":
            conversation.clear()
            tell("forgotten\n")
        case "/history":
            for turn in conversation.turns():
                tell(f"{turn['role']}: {turn['content']}\n")
        case _ if text.startswith("/"):
            tell(f"{HELP}\n")
        case _:
            try:
                conversation.say(text)
            except KeyboardInterrupt:
                tell("\n[stopped]\n")
            except WeftError as error:
                note(error.message)


class Conversation:
    """The turns of a chat, with answers streamed to the terminal."""

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
        """`media` has the files of the next message."""
        self._is_verbose = is_verbose
        self._media: MessageMedia = media or {}
        self._mesh = mesh
        self._model = model
        self._history = history
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._inside_line = False

    def run(self, once: str | None, home: Path) -> None:
        """Answers one message, or without one converses until the user leaves."""
        if once is not None:
            self.say(once)
            return
        with prompt_history(home):
            converse(self)

    def turns(self) -> list[Message]:
        """Returns the conversation so far, without stopped answers."""
        return list(self._history)

    def clear(self) -> None:
        """Clears the conversation except for the system prompt."""
        self._history[:] = [turn for turn in self._history if turn["role"] == "system"]

    def say(self, text: str) -> None:
        """Sends a message and prints the answer with its timings."""
        self._inside_line = False
        turns: list[Message] = [*self._history, user_message(text, self._media)]
        answer: list[str] = []
        try:
            for event in self._mesh.chat(self._model, turns, timeout=self._timeout_seconds, **self._options):
                self._show(event, answer)
        except WeftError as error:
            self._show_cost(error)
            if error.reason is not Reason.DEADLINE_EXCEEDED:
                raise
            late = f"the answer exceeded the timeout of {self._timeout_seconds:g} s; set a longer one with --timeout"
            raise WeftError(error.reason, late, metadata=error.metadata) from error
        self._history[:] = [*turns, {"role": "assistant", "content": "".join(answer)}]
        self._media = {}

    def _show(self, event: event_pb2.InferenceEvent, answer: list[str]) -> None:
        match event.WhichOneof("event"):
            case "delta" if text := event.delta.text:
                say_answer(text)
                self._inside_line = not text.endswith("\n")
                answer.append(text)
            case "queued":
                _aside(f"queued, position {event.queued.position}: {event.queued.reason}")
            case "loading":
                loading = event.loading
                share = f" {loading.progress:.0%}" if loading.HasField("progress") else ""
                left = f", {wait_words(loading.eta.ToNanoseconds() / 1e9)} s left" if loading.HasField("eta") else ""
                _aside(f"loading{share}{left}: {loading.stage}")
            case "finished":
                say("\n")
                self._show_receipt(event.finished.receipt)
            case _ if line := _notice(event):
                if self._inside_line and is_out_terminal() and is_err_terminal():
                    # Only if both are on a terminal: otherwise stdout must contain the unchanged answer.
                    tell("\n")
                    self._inside_line = False
                _aside(line)

    def _show_receipt(self, receipt: receipt_pb2.Receipt) -> None:
        _aside(timings(receipt))
        if not self._is_verbose:
            return
        if receipt.request_id:
            _aside(f"weft explain {receipt.request_id}")
        for line in receipt_lines(document_of(receipt), receipt.request_id):
            _aside(line)

    def _show_cost(self, error: WeftError) -> None:
        """Prints the cost of a stopped answer, if known."""
        if not {PROMPT_TOKENS, COMPLETION_TOKENS} <= error.metadata.keys():
            return
        if self._inside_line:
            say("\n")
        _aside(f"{error.metadata[PROMPT_TOKENS]} + {error.metadata[COMPLETION_TOKENS]} tokens before it was stopped")


def _notice(event: event_pb2.InferenceEvent) -> str:
    """Returns the notice line of an event; empty if it is not a notice."""
    match event.WhichOneof("event"):
        case "signal":
            return f"signal {event.signal.name}{_arguments(event.signal.arguments)}"
        case "warning":
            return f"warning: {event.warning.message}"
        case "tool_call":
            return f"tool {event.tool_call.name}{_arguments(event.tool_call.arguments)}"
        case "tool_result":
            outcome = "failed" if event.tool_result.failed else "answered"
            return f"tool {outcome}: {shortened(event.tool_result.content, MAX_SHOWN_CHARS)}"
        case _:
            return ""


def _arguments(arguments: json_value_pb2.JsonObject) -> str:
    given = plain_object(arguments)
    return f" {shortened(json.dumps(given, ensure_ascii=False), MAX_SHOWN_CHARS)}" if given else ""


def _aside(text: str) -> None:
    """Prints text besides the answer, dimmed on a terminal."""
    tell(f"{safe_text(text)}\n", DIM)


def timings(receipt: receipt_pb2.Receipt) -> str:
    """Returns one line: tokens, speed, time to first token, waits, the runner, and the request's id.

    Omits unknown values.
    """
    usage, speed = receipt.usage, receipt.tokens_per_second
    known = document_of(usage)
    is_counted = receipt.HasField("usage") and has_tokens(known)
    load = receipt.load_wait.ToNanoseconds() / 1e9
    parts = (
        f"{'~' * usage.prompt_estimated}{usage.prompt_tokens} + {usage.completion_tokens} tokens" if is_counted else "",
        *work_parts(known),
        f"{speed:.{0 if speed >= 10 else 1}f} tokens/s" if speed else "",
        f"first token {time_words(receipt.time_to_first_token.ToNanoseconds() / 1e9)}"
        if receipt.HasField("time_to_first_token")
        else "",
        f"queue {time_words(receipt.queue_wait.ToNanoseconds() / 1e9)}",
        f"load {time_words(load)}" if load else "",
        f"{usage.cached_prompt_tokens} cached" if usage.cached_prompt_tokens else "",
        f"{receipt.attempts[-1].runner} on {receipt.host}",
        f"request {receipt.request_id}" if receipt.request_id else "",
    )
    return ", ".join(filter(None, parts))
