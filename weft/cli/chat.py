"""`weft chat`: talk to a model, with timings."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.cli.options import DEFAULT_HOME, HomeOption, reporting
from weft.client import ChatOptions, Mesh, Message, WeftError, connect

QUIT_WORDS = frozenset({"/quit", "/exit", "/bye"})


def chat(
    model: Annotated[str, typer.Argument(help="A model or a pool.")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    timeout: Annotated[float, typer.Option(help="Deadline of one answer in seconds.")] = 600.0,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Chat with a model. The answer goes to stdout, everything else to stderr.

    Example: weft chat smollm2-135m -m "Why is the sky blue?"
    """
    options: ChatOptions = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    with reporting(), connect(home=home) as mesh:
        conversation = Conversation(mesh, model, history, options, timeout)
        if message is not None:
            conversation.say(message)
            return
        if not sys.stdin.isatty():
            conversation.say(sys.stdin.read())
            return
        _converse(conversation)


def _converse(conversation: "Conversation") -> None:
    sys.stderr.write("Ctrl-C stops an answer, Ctrl-D leaves.\n")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            sys.stderr.write("\n")
            return
        if text in QUIT_WORDS:
            return
        if text:
            try:
                conversation.say(text)
            except KeyboardInterrupt:
                sys.stderr.write("\n[stopped]\n")
            except WeftError as error:
                sys.stderr.write(f"weft: {error.message}\n")


class Conversation:
    """Turns of one chat, answers streamed as they come."""

    def __init__(
        self, mesh: Mesh, model: str, history: list[Message], options: ChatOptions, timeout_seconds: float
    ) -> None:
        self._mesh = mesh
        self._model = model
        self._history = history
        self._options = options
        self._timeout_seconds = timeout_seconds
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Say something and print the answer with its timings."""
        turns: list[Message] = [*self._history, {"role": "user", "content": text}]
        answer: list[str] = []
        events = self._mesh.chat(self._model, turns, timeout=self._timeout_seconds, **self._options)
        for event in events:
            self._show(event, answer)
        self._history[:] = [*turns, {"role": "assistant", "content": "".join(answer)}]

    def _show(self, event: event_pb2.InferenceEvent, answer: list[str]) -> None:
        match event.WhichOneof("event"):
            case "delta":
                answer.append(event.delta.text)
                sys.stdout.write(event.delta.text)
                sys.stdout.flush()
            case "queued":
                self._console.print(f"[dim]queued, place {event.queued.position}: {event.queued.reason}[/dim]")
            case "loading":
                self._console.print(f"[dim]loading: {event.loading.stage}[/dim]")
            case "finished":
                sys.stdout.write("\n")
                sys.stdout.flush()
                self._console.print(f"[dim]{timings(event.finished.receipt)}[/dim]")


def timings(receipt: receipt_pb2.Receipt) -> str:
    """One line: tokens, speed, first token, waits, and who did it."""
    usage = receipt.usage
    first = receipt.time_to_first_token.ToNanoseconds() / 1e9
    queue = receipt.queue_wait.ToNanoseconds() / 1e9
    load = receipt.load_wait.ToNanoseconds() / 1e9
    parts = [
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens",
        f"{receipt.tokens_per_second:.0f} tokens/s",
        f"first token {first:.2f} s",
        f"queue {queue:.2f} s",
    ]
    if load:
        parts.append(f"load {load:.2f} s")
    if usage.cached_prompt_tokens:
        parts.append(f"{usage.cached_prompt_tokens} cached")
    parts.append(f"{receipt.attempts[-1].runner} on {receipt.host}")
    return ", ".join(parts)
