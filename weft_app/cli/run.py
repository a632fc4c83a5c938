"""`weft run`: pulls, loads and chats with a model. It starts a mesh if none is running."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.client import ChatOptions, Mesh, Message, connect
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.short_names import short_names_hint, short_source
from weft.kernel.values.names import is_model_name
from weft_app.cli.asked_model import MODEL, asked_to_serve
from weft_app.cli.background import is_mesh_running, session_mesh
from weft_app.cli.chat import (
    AudioOption,
    Conversation,
    ImageOption,
    MaxTokensOption,
    SystemOption,
    TemperatureOption,
    ThinkingOption,
    TimeoutOption,
    VerboseOption,
    chat_options,
    only_message,
    read_media,
    resolve,
    user_message,
)
from weft_app.cli.completion import complete_chat_target
from weft_app.cli.mesh_api import Document, MeshApi
from weft_app.cli.mesh_api import connect as connect_api
from weft_app.cli.operations import (
    WATCH_TIMEOUT_SECONDS,
    TokenOption,
    begin,
    cancelled,
    follow,
    has_ended,
    read_token,
)
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, OutputFormat, ended_by_signals
from weft_app.cli.output import print_document
from weft_app.cli.terminal import note, safe_text, tell
from weft_app.compose.home import WeftHome

SLOTS = "slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model that accepts requests."""

    name: str
    """Name in requests."""
    header: str = ""
    added: Document | None = None
    """Its chosen settings with the reasons; None: the mesh served it before."""


def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar=MODEL,
            help="A model of the mesh, a short name (llama3.2), or a source: hf:OWNER/REPO[:FILE], a URL or a path.",
            autocompletion=complete_chat_target,
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="One message. Default: a conversation, or stdin.")
    ] = None,
    *,
    image: ImageOption = None,
    audio: AudioOption = None,
    context: Annotated[
        int | None, typer.Option("--context", "--ctx", min=16, max=16_777_216, help="Context of one slot in tokens.")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=1024, help="Concurrent requests.")] = None,
    name: Annotated[str, typer.Option(help="Name of the model in the mesh. Default: derived from its source.")] = "",
    runner: Annotated[str, typer.Option(help="With a source: runner that should serve it.")] = "",
    system: SystemOption = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    thinking: ThinkingOption = None,
    timeout: TimeoutOption = 600.0,
    verbose: VerboseOption = False,
    token: TokenOption = None,
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="json or yaml: the answer as a document; table: as text.")
    ] = OutputFormat.TABLE,
) -> None:
    """Pull, load and chat with a model, by its name or source. Starts weft for this command if it is not running.

    weft derives the context and the slots from the model's file and the available memory, and prints them on stderr.

    Example: weft run hf:Qwen/Qwen3-0.6B-GGUF "Why is the sky blue?"
    """
    asked = asked_to_serve(model, {"--name": name, "--runner": runner})
    text = only_message(prompt, "PROMPT")
    if output is not OutputFormat.TABLE and text is None:
        raise invalid_field("--output", "is for a single answer; give a PROMPT, or pipe it in")
    settings: Document = {} if context is None else {"contextTokens": context}
    settings |= {} if slots is None else {"parameters": {SLOTS: slots}}
    media = read_media(image, audio)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    options = chat_options(max_tokens, temperature, thinking)
    authorization = "" if token is None else read_token(token)
    folder = WeftHome(home.expanduser().absolute())
    with ended_by_signals(), ExitStack() as stack:
        if not is_mesh_running(folder):
            _start_session(stack, folder, config)
        load: Document = {"type": "load", "model": name or asked.name, "source": asked.source, "runner": runner}
        load["settings"] = settings
        if asked.source and not (name or runner) and is_model_name(model) and _is_served(model, home):
            load |= {"model": model, "source": ""}
        running = _running(load, authorization, home)
        mesh = stack.enter_context(connect(home=home))
        if output is not OutputFormat.TABLE and text is not None:
            turns = [*history, user_message(text, media)]
            print_document(_answer_document(mesh, running, turns, options, timeout), output)
            return
        tell(running.header if verbose else "")
        Conversation(mesh, running.name, history, options, timeout, media=media, is_verbose=verbose).run(text, home)


def _start_session(stack: ExitStack, home: WeftHome, config: Path | None) -> None:
    """Starts a mesh that ends with this command, with a note."""
    note(f"weft is not running (home {home.root}); starting it for this command, logs in {home.logs}")
    facts = stack.enter_context(session_mesh(home, config))
    note(f"it serves {facts['url']}/v1 until this command ends; to keep it running, use `weft up --home {home.root}`")


def _running(load: Document, authorization: str, home: Path) -> RunningModel:
    """Returns the model once the mesh serves it. Pulls and loads a model given by its source."""
    name, source = load["model"], load["source"]
    if not source:
        try:
            name, header = resolve(name, home)
        except WeftError as error:
            source = _short_source(name, error)
            note(f"{name} is {source}")
        else:
            if load["settings"]:
                _load(load | {"model": name}, authorization, home)
            return RunningModel(name=name, header=header)
    added = _load(load | {"source": source}, authorization, home)["result"]["added"]
    note(f"{safe_text(added['source'])} is served as {added['name']}")
    for reason in added.get("reasons", ()):
        note(f"  {safe_text(reason)}")
    return RunningModel(name=added["name"], header=resolve(added["name"], home)[1], added=added)


def _short_source(name: str, unserved: WeftError) -> str:
    """Returns the source of a short name that the mesh does not serve.

    Raises `unserved`, the mesh's error, if the name is not a short name.
    """
    if unserved.reason is not Reason.MODEL_NOT_FOUND:
        raise unserved
    source = short_source(name)
    if source is None:
        hint = f"{unserved.message}; a model of the hub is named as hf:OWNER/REPO, or by a short name: "
        hint += short_names_hint(name)
        raise WeftError(unserved.reason, hint, metadata=unserved.metadata) from unserved
    return source


def _is_served(name: str, home: Path) -> bool:
    try:
        resolve(name, home)
    except WeftError as error:
        if error.reason is not Reason.MODEL_NOT_FOUND:
            raise
        return False
    return True


def _load(load: Document, authorization: str, home: Path) -> Document:
    """Loads a model with progress on stderr; Ctrl-C cancels it."""
    with connect_api(home, WATCH_TIMEOUT_SECONDS) as api:
        operation = begin(api, load, authorization=authorization)
        return follow(api, operation, shown=True, interrupted=partial(_cancel, api))


def _cancel(api: MeshApi, operation: Document) -> None:
    """Cancels a running load. Returns once it has ended."""
    if not has_ended(operation):
        cancelled(api, operation["name"])
    note("stopped; the pulled parts are kept; run the same command to continue")


def _answer_document(
    mesh: Mesh, running: RunningModel, turns: list[Message], options: ChatOptions, timeout_seconds: float
) -> dict[str, Any]:
    """Returns one answer with its receipt as a document."""
    pieces: list[str] = []
    document: dict[str, Any] = {"kind": "RunAnswer", "model": running.name}
    if running.added is not None:
        document["added"] = running.added
    for event in mesh.chat(running.name, turns, timeout=timeout_seconds, **options):
        match event.WhichOneof("event"):
            case "delta":
                pieces.append(event.delta.text)
            case "finished":
                document["receipt"] = document_of(event.finished.receipt)
    return {**document, "text": "".join(pieces)}
