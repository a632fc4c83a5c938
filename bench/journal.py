"""Journaled requests: what a durable row for each request costs, beside the same request without one."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import yaml

from bench import measures
from bench.contender import WEFT
from bench.launch import LaunchError, own_mesh
from bench.load import percentile
from bench.report import Figures
from bench.scenarios import Options
from weft_testing.fake_backend.process import fake_backend_command

PLAIN, JOURNALED = "plain", "journaled"
MODELS = (PLAIN, JOURNALED)
REQUESTS = 100
"""Of each model in one run."""
WARM_UP = 10
TOKENS = 16


def measure_journal(options: Options, figures: Figures, folder: Path) -> None:
    """One mesh with the same model twice; unary chats one after another, in turns of both."""
    with _mesh(folder) as (host, address):
        for model in MODELS:
            _ask(address, model, WARM_UP)
        for number in range(options.repetitions):
            # Each model begins as often as the other: what comes first meets another machine.
            for model in MODELS if number % 2 == 0 else reversed(MODELS):
                before = _cpu_seconds(host)
                seconds = _ask(address, model, REQUESTS)
                spent = _cpu_seconds(host) - before
                figures.add(measures.JOURNAL_P50[model], WEFT.name, 1e3 * percentile(seconds, 0.50))
                figures.add(measures.JOURNAL_P99[model], WEFT.name, 1e3 * percentile(seconds, 0.99))
                figures.add(measures.JOURNAL_CPU[model], WEFT.name, 1e6 * spent / REQUESTS)


@contextmanager
def _mesh(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Its host process, which is gateway and router, and the address of its HTTP API."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "weft.yaml"
    models = [
        {"name": PLAIN, "path": __file__, "slots": 8},
        {"name": JOURNALED, "path": __file__, "slots": 8, "journal": "wait"},
    ]
    runner = {"name": "box", "command": fake_backend_command(), "models": models}
    config.write_text(yaml.safe_dump({"runners": [runner]}))
    with own_mesh(folder, PLAIN, config) as (host, home):
        yield host, urlsplit(json.loads((home / "run" / "up.json").read_text())["url"]).netloc


def _ask(address: str, model: str, count: int) -> list[float]:
    """Returns the seconds that each answer took. Raises LaunchError for one that is no answer or no task."""
    body = json.dumps({"model": model, "max_tokens": TOKENS, "messages": [{"role": "user", "content": "Hi"}]})
    taken = []
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        for _ in range(count):
            began = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            taken.append(time.perf_counter() - began)
            if answer.status != 200 or (answer.headers["x-weft-task-id"] is not None) is not (model == JOURNALED):
                raise LaunchError(f"{model}: status {answer.status}, task {answer.headers['x-weft-task-id']}")
    return taken


def _cpu_seconds(host: psutil.Process) -> float:
    spent = host.cpu_times()
    return float(spent.user + spent.system)
