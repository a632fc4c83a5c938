"""A mesh that has served and refused requests, with some that run and wait, for the pages about them."""

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mesh_process import MeshProcess, fake_runner, running_mesh, write_config

WAITERS = 3


@contextmanager
def served_mesh(folder: Path) -> Iterator[MeshProcess]:
    """One model that answers at once, one with a single slot that speaks slowly, and one that dies as it answers."""
    quick = fake_runner("a", pool="quick", answer_tokens=24, tokens_per_second=200)
    slow = fake_runner("b", pool="slow", slots=1, answer_tokens=0, tokens_per_second=20)
    # Slowly enough that its answer has begun: before that it would be retried.
    dying = fake_runner("c", pool="dying", crash_after_tokens=2, tokens_per_second=10)
    config = write_config(folder, quick, slow, dying, router={"queue_timeout_seconds": 600.0})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


def call(mesh: MeshProcess, method: str, path: str, body: Any = None, request_id: str = "", tenant: str = "") -> Any:
    """The JSON answer; raises HTTPError for a refusal."""
    named = {"X-Request-ID": request_id, "X-Tenant-ID": tenant}
    headers = {"Content-Type": "application/json"} | {name: value for name, value in named.items() if value}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{mesh.url}{path}", method=method, data=data, headers=headers), timeout=120) as answer:
        return json.load(answer)


def chat(mesh: MeshProcess, model: str, request_id: str = "", *, tenant: str = "", **fields: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return call(mesh, "POST", "/v1/chat/completions", body, request_id, tenant)


@contextmanager
def busy(mesh: MeshProcess, waiters: int = WAITERS) -> Iterator[list[str]]:
    """One request that runs on the slow model, and those that wait for its slot: their ids. All are cancelled later."""
    ids = [f"slow-{number}" for number in range(1 + waiters)]

    def ask(request_id: str) -> None:
        with suppress(HTTPError):
            chat(mesh, "slow", request_id, max_tokens=100_000)

    with ThreadPoolExecutor(len(ids)) as pool:
        asked: list[Future[None]] = []
        try:
            for request_id in ids:
                asked.append(pool.submit(ask, request_id))
                until_known(mesh, request_id)
            yield ids
        finally:
            for request_id in ids:
                with suppress(HTTPError):
                    call(mesh, "POST", f"/v1/requests/{request_id}/cancel")


def until_known(mesh: MeshProcess, request_id: str) -> None:
    """Returns once the router has the request."""
    while all(each["requestId"] != request_id for each in call(mesh, "GET", "/v1/requests")["items"]):
        pass
