"""The host program of an engine: one model in a process of its own, for the runner that started it.

A program connects to the runner's socket, authenticates with the token in WEFT_ENGINE_TOKEN, loads the model and
answers until the connection ends. An engine works in the main thread, and in further ones if it has several slots;
another thread reads, so that cancellations and pings are received while native code runs.
"""

import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec

from runner_svc.engine_host.engine import CancelledRequestError, Engine, Job, LibraryMissingError, RefusedError, Send
from runner_svc.engine_host.messages import (
    LIBRARY_MISSING,
    LOAD_ID,
    TOKEN_VARIABLE,
    Cancel,
    Failed,
    Hello,
    Ping,
    Pong,
    ToEngine,
    TooLongError,
    ToRunner,
    Work,
    encode,
    read_message,
)

MAX_WAITING = 16
"""Maximum number of waiting requests; the runner sends no more than there are slots, and cancelled ones end soon."""


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


class Host:
    """The requests of the runner: one thread reads them, the threads of the engine take them from bounded queues."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self._connection = connection
        self._engine = engine
        self._jobs: dict[int, Job] = {}
        """The unfinished requests, by id."""
        self._waiting: queue.Queue[tuple[Work, Job]] = queue.Queue(MAX_WAITING + engine.facts.slots)

    def run(self) -> NoReturn:
        """Answer requests until the connection ends, which ends the process."""
        facts = self._engine.facts
        further = [self.work] * (facts.slots - 1)
        for target in (self.listen, *further):
            threading.Thread(target=target, daemon=True).start()
        print("model loaded", file=sys.stderr, flush=True)  # noqa: T201 - a log line
        self._connection.send(facts)
        self.work()

    def work(self) -> NoReturn:
        """Work on one request after the other."""
        while True:
            request, job = self._waiting.get()
            self._answer(job, partial(self._engine.work, request, job))

    def listen(self) -> None:
        """Read the runner's messages; at the end of the connection the process exits, also while the engine works."""
        try:
            while True:
                match self._connection.receive():
                    case Ping(id=number):
                        self._connection.send(Pong(number))
                    case Cancel(id=number):
                        if (job := self._jobs.get(number)) is not None:
                            job.cancel()
                    case request:
                        self._take(request)
        except (EOFError, OSError):
            os._exit(0)
        except (TooLongError, msgspec.DecodeError):
            traceback.print_exc()
            os._exit(1)

    def _take(self, request: Work) -> None:
        job = self._jobs[request.id] = Job(request.id, self._connection.send)
        try:
            self._waiting.put_nowait((request, job))
        except queue.Full:
            del self._jobs[request.id]
            self._connection.send(Failed(request.id, "BACKEND_NOT_READY", "the engine is busy"))

    def _answer(self, job: Job, work: Callable[[], None]) -> None:
        """Do the work on a request, and report its failure; nothing if it was cancelled."""
        try:
            try:
                job.raise_if_cancelled()
                work()
            except CancelledRequestError:
                pass
            except RefusedError as refusal:
                job.send(Failed(job.id, refusal.reason, str(refusal)))
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001 - reported to the runner; the next request may succeed
                if not job.is_cancelled:
                    job.send(Failed(job.id, "BACKEND_ERROR", f"the engine failed: {error}"))
                    traceback.print_exc()
        except BrokenPipeError:
            os._exit(0)
        finally:
            self._jobs.pop(job.id, None)


def serve(path: str, load: Callable[[Send], Engine]) -> NoReturn:
    """Connect to the runner's socket, load the model, and answer requests until the connection ends."""
    # Python's own SIGINT handler would wait for native code to return; the default action ends a load at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    connection = Connection(path)
    connection.send(Hello(os.environ.pop(TOKEN_VARIABLE, ""), os.getpid()))
    try:
        engine = load(connection.send)
    except LibraryMissingError as missing:
        connection.send(Failed(LOAD_ID, LIBRARY_MISSING, str(missing)))
        sys.exit(f"{missing.library} cannot be imported: {missing.cause}")
    except RefusedError as refusal:
        connection.send(Failed(LOAD_ID, refusal.reason, str(refusal)))
        sys.exit(f"the model cannot be loaded: {refusal}")
    Host(connection, engine).run()
