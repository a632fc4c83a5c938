"""The host program of llama-cpp-python: one model in a process of its own, for the runner that started it.

    python -m runner_svc.runtimes.llama_cpp_python.host --socket PATH --model FILE --context-tokens 2048

It connects to the runner's socket, authenticates with the token in WEFT_ENGINE_TOKEN, loads the model and answers
until the connection ends. The engine works in the main thread; another one reads, so that cancellations and pings are
received while native code runs.
"""

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from runner_svc.runtimes.llama_cpp_python.engine import CACHE_TYPES, EngineOptions, LlamaCppEngine
from runner_svc.runtimes.llama_cpp_python.messages import (
    LIBRARY_MISSING,
    LOAD_ID,
    TOKEN_VARIABLE,
    Cancel,
    Failed,
    Hello,
    Ping,
    Pong,
    Ready,
    ToEngine,
    Tokenize,
    TooLongError,
    ToRunner,
    Work,
    encode,
    read_message,
)

MAX_WAITING = 16
"""Maximum number of waiting requests; the runner sends one at a time, and cancelled ones end soon."""
MAX_WAITING_TEXTS = 64


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="llama_cpp_host", description=__doc__)
    parser.add_argument("--socket", required=True, help="Unix socket on which the runner listens")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--context-tokens", type=int, default=2048, help="0: what the model was made for")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: all, where the library was built for a GPU")
    parser.add_argument("--batch-tokens", type=int, default=512, help="tokens per step of prefill")
    parser.add_argument("--flash-attention", choices=["on", "off"], default="off")
    parser.add_argument("--cache-type-k", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--cache-type-v", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--tensor-split", type=_parts, default=(), help="parts of the model for each device: 3,1")
    parser.add_argument("--embeddings", action="store_true")
    return parser.parse_args(argv)


def _parts(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


class Connection:
    """The connection to the runner."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._reader = self._socket.makefile("rb")
        self._sending = threading.Lock()
        self._decoder = msgspec.json.Decoder(ToEngine)

    def send(self, message: ToRunner) -> None:
        """Send a message, from any thread; blocks while the runner does not read."""
        data = encode(message)
        with self._sending:
            self._socket.sendall(data)

    def receive(self) -> ToEngine:
        """Returns the next message. Raises EOFError, TooLongError, msgspec.DecodeError or OSError."""
        return read_message(self._read_exactly, self._decoder)

    def _read_exactly(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise EOFError
        return data


def count_tokens(engine: LlamaCppEngine, waiting: queue.Queue[Tokenize]) -> None:
    """Answer Tokenize requests one by one; in a thread of its own, so that they do not wait for a generation."""
    while True:
        request = waiting.get()
        try:
            engine.tokenize(request)
        except BrokenPipeError:
            os._exit(0)
        except Exception:  # noqa: BLE001 - reported to the runner already; the next request may succeed
            traceback.print_exc()


def listen(
    connection: Connection, engine: LlamaCppEngine, waiting: queue.Queue[Work], texts: queue.Queue[Tokenize]
) -> None:
    """Read the runner's messages; at the end of the connection the process exits, also while the engine works."""
    try:
        while True:
            match connection.receive():
                case Ping(id=number):
                    connection.send(Pong(number))
                case Cancel(id=number):
                    engine.cancel(number)
                case request:
                    try:
                        if isinstance(request, Tokenize):
                            texts.put_nowait(request)
                        else:
                            waiting.put_nowait(request)
                    except queue.Full:
                        connection.send(Failed(request.id, "BACKEND_NOT_READY", "the engine is busy"))
    except (EOFError, OSError):
        os._exit(0)
    except (TooLongError, msgspec.DecodeError):
        traceback.print_exc()
        os._exit(1)


def load(options: argparse.Namespace, connection: Connection) -> LlamaCppEngine:
    """Loads the model. Exits the program when the library is missing."""
    try:
        library: Any = import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        connection.send(Failed(LOAD_ID, LIBRARY_MISSING, f"{type(error).__name__}: {error}"))
        sys.exit(f"llama_cpp cannot be imported: {error}")
    return LlamaCppEngine(
        library,
        EngineOptions(
            model_path=options.model,
            context_tokens=options.context_tokens,
            threads=options.threads,
            gpu_layers=options.gpu_layers,
            batch_tokens=options.batch_tokens,
            embeddings=options.embeddings,
            flash_attention=options.flash_attention == "on",
            cache_type_k=options.cache_type_k,
            cache_type_v=options.cache_type_v,
            tensor_split=options.tensor_split,
        ),
        connection.send,
    )


def main() -> None:
    """Load the model, then work on one request after the other."""
    # Python's own SIGINT handler would wait for native code to return; the default action ends a load at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = parse_arguments()
    connection = Connection(options.socket)
    connection.send(Hello(os.environ.pop(TOKEN_VARIABLE, ""), os.getpid()))
    engine = load(options, connection)
    waiting: queue.Queue[Work] = queue.Queue(MAX_WAITING)
    texts: queue.Queue[Tokenize] = queue.Queue(MAX_WAITING_TEXTS)
    threading.Thread(target=partial(count_tokens, engine, texts), daemon=True).start()
    threading.Thread(target=partial(listen, connection, engine, waiting, texts), daemon=True).start()
    print(f"model loaded, {engine.context_tokens} tokens of context", file=sys.stderr, flush=True)  # noqa: T201 - a log line
    connection.send(Ready(engine.context_tokens))
    while True:
        request = waiting.get()
        try:
            engine.work(request)
        except BrokenPipeError:
            os._exit(0)
        except Exception:  # noqa: BLE001 - reported to the runner already; the next request may succeed
            traceback.print_exc()


if __name__ == "__main__":
    main()
