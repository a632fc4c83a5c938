"""The framework of the bad-input catalogue: endpoints, cases, the process under test, and the checks of its answers.

A family of cases is a file of its own, `bad_inputs_<family>.py`, and holds `CASES`. A new endpoint is one line in
`ENDPOINTS`; until it is, `test_bad_inputs.py` fails.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from gateway_script import RawResponse, head
from kit.library_words import library_words

from gateway.errors import OLLAMA_JSON

HERE = Path(__file__).parent
EVERY = 4
FEW = 8
"""A case that concerns no more endpoints is sent to all of them."""
ANSWER_SECONDS = 10.0
"""Maximum time for an answer."""
SECRET = "s3cr3t-of-the-caller"  # a key that no answer and no log line may hold
_LAST_LINES_BYTES = 16_384
_LEAKS = re.compile(
    r'Traceback|File "|site-packages|pydantic|/work/|/home/|/root/|/usr/|\.py\b|0x[0-9a-f]{8}|weft_[a-z0-9]{12}_'
)


@dataclass(frozen=True)
class Endpoint:
    """One route. `good` is a valid body; `kind` selects the cases about fields."""

    method: str
    path: str
    kind: str
    good: Mapping[str, Any] | None = None
    dialect: str = "openai"

    @property
    def route(self) -> tuple[str, str]:
        """Its method and its path, without the names of parameters."""
        return self.method, nameless(self.path)

    @property
    def address(self) -> str:
        """A path of this route."""
        return re.sub(r"\{[^}]*\}", "tiny", self.path)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def nameless(path: str) -> str:
    """A path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)


_HI = [{"role": "user", "content": "hi"}]
_CHAT = {"model": "tiny", "messages": _HI}
_MESSAGES = {"model": "tiny", "max_tokens": 9, "messages": _HI}
_BATCH = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
_MODEL = {"kind": "model", "name": "tiny"}
RESOURCE_KINDS = (
    "models",
    "agents",
    "runners",
    "pools",
    "routes",
    "aliases",
    "workflows",
    "tenants",
    "trials",
)

ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "chat", _CHAT),
    Endpoint("POST", "/v1/completions", "completions", {"model": "tiny", "prompt": "hi"}),
    Endpoint("POST", "/v1/embeddings", "embeddings", {"model": "tiny", "input": "hi"}),
    Endpoint("POST", "/v1/messages", "messages", _MESSAGES, "anthropic"),
    Endpoint("POST", "/v1/messages/count_tokens", "count", {"model": "tiny", "messages": _HI}, "anthropic"),
    Endpoint("POST", "/api/chat", "ollama", {"model": "tiny", "messages": _HI}, "ollama"),
    Endpoint("POST", "/api/generate", "ollama", {"model": "tiny", "prompt": "hi"}, "ollama"),
    Endpoint("POST", "/api/embed", "ollama", {"model": "tiny", "input": "hi"}, "ollama"),
    Endpoint("POST", "/api/embeddings", "ollama", {"model": "tiny", "prompt": "hi"}, "ollama"),
    Endpoint("POST", "/api/pull", "operation", {"model": "hf:a/b"}, "ollama"),
    Endpoint("POST", "/api/show", "facts", {"model": "tiny"}, "ollama"),
    *(Endpoint("GET", f"/api/{facts}", "read", dialect="ollama") for facts in ("tags", "ps", "version")),
    *(
        Endpoint("POST", f"/api/{change}", "refused", dialect="ollama")
        for change in ("create", "copy", "push", "blobs/{digest}")
    ),
    Endpoint("DELETE", "/api/delete", "refused", dialect="ollama"),
    Endpoint("GET", "/", "read"),
    Endpoint("POST", "/v1/responses", "responses", {"model": "tiny", "input": "hi", "store": False}),
    Endpoint("POST", "/v1/rerank", "rerank", {"model": "tiny", "query": "hi", "documents": ["a"]}),
    Endpoint("POST", "/rerank", "rerank", {"model": "tiny", "query": "hi", "documents": ["a"]}),
    Endpoint("POST", "/v1/tokenize", "tokenize", {"model": "tiny", "content": "hi"}),
    Endpoint("POST", "/tokenize", "tokenize", {"model": "tiny", "content": "hi"}),
    Endpoint("POST", "/v1/images/generations", "images", {"model": "tiny", "prompt": "hi"}),
    Endpoint("POST", "/v1/images/edits", "upload"),
    Endpoint("POST", "/v1/images/variations", "upload"),
    Endpoint("POST", "/v1/audio/speech", "speech", {"model": "tiny", "input": "hi", "voice": "a"}),
    Endpoint("POST", "/v1/audio/transcriptions", "upload"),
    Endpoint("POST", "/v1/audio/translations", "upload"),
    Endpoint("PUT", "/api/v1/config", "settings", {"allowCloudFallback": True}),
    Endpoint("POST", "/api/v1/apply", "declaration", {"documents": [_MODEL]}),
    Endpoint("PUT", "/api/v1/models/{name}", "declaration", _MODEL),
    Endpoint("PUT", "/api/v1/agents/{name}", "declaration", {"kind": "agent", "name": "tiny", "target": "tiny"}),
    Endpoint("PUT", "/api/v1/routes/{name}", "declaration", {"kind": "route", "name": "tiny"}),
    Endpoint("PUT", "/api/v1/aliases/{name}", "declaration", {"kind": "alias", "name": "tiny", "target": "tiny"}),
    Endpoint("PUT", "/api/v1/workflows/{name}", "declaration", {"kind": "workflow", "name": "tiny", "model": "tiny"}),
    Endpoint("PUT", "/api/v1/tenants/{name}", "declaration", {"kind": "tenant", "name": "tiny"}),
    Endpoint("PUT", "/api/v1/trials/{name}", "declaration", {"kind": "trial", "name": "tiny"}),
    Endpoint("POST", "/v1/admin/models/{name}/load", "admin", {}),
    Endpoint("POST", "/v1/admin/models/{name}/unload", "admin", {}),
    Endpoint("POST", "/v1/admin/models/{name}/remove", "admin", {}),
    Endpoint("POST", "/v1/admin/servers/{name}/detach", "admin", {}),
    Endpoint("POST", "/v1/admin/models", "admin", {"source": "hf:some/repo"}),
    Endpoint("POST", "/v1/admin/pulls", "admin", {"source": "hf:some/repo"}),
    Endpoint("POST", "/v1/admin/cache/flush", "admin", {"scope": "all"}),
    Endpoint("POST", "/v1/admin/join-tokens", "admin", {}),
    Endpoint("POST", "/api/v1/inference-tasks", "task", {"body": _CHAT}),
    Endpoint("GET", "/api/v1/inference-tasks", "read"),
    Endpoint("GET", "/api/v1/inference-tasks/{id}", "read"),
    Endpoint("GET", "/api/v1/inference-tasks/{id}/events", "read"),
    Endpoint("POST", "/api/v1/inference-tasks/{id}/cancel", "action"),
    Endpoint("DELETE", "/api/v1/inference-tasks/{id}", "action"),
    Endpoint("POST", "/mcp", "mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}),
    Endpoint("GET", "/v1/trials/{name}", "read"),
    Endpoint("GET", "/v1/trials/{name}/pairs/{task}", "read"),
    Endpoint("POST", "/v1/trials/{name}/pairs/{task}/verdict", "admin", {"verdict": "a"}),
    Endpoint("POST", "/v1/responses/{id}/cancel", "action"),
    Endpoint("GET", "/v1/responses/{id}", "read"),
    Endpoint("GET", "/v1/responses/{id}/input_items", "read"),
    Endpoint("DELETE", "/v1/responses/{id}", "action"),
    Endpoint("POST", "/v1/conversations", "conversation", {"items": _HI}),
    Endpoint("POST", "/v1/conversations/{id}", "conversation", {"metadata": {"a": "b"}}),
    Endpoint("POST", "/v1/conversations/{id}/items", "conversation", {"items": _HI}),
    Endpoint("GET", "/v1/conversations/{id}", "read"),
    Endpoint("GET", "/v1/conversations/{id}/items", "read"),
    Endpoint("GET", "/v1/conversations/{id}/items/{item}", "read"),
    Endpoint("DELETE", "/v1/conversations/{id}", "action"),
    Endpoint("DELETE", "/v1/conversations/{id}/items/{item}", "action"),
    Endpoint("POST", "/v1/files", "upload"),
    Endpoint("GET", "/v1/files", "read"),
    Endpoint("GET", "/v1/files/{id}", "read"),
    Endpoint("GET", "/v1/files/{id}/content", "read"),
    Endpoint("DELETE", "/v1/files/{id}", "action"),
    Endpoint("POST", "/v1/batches", "batch", _BATCH),
    Endpoint("GET", "/v1/batches", "read"),
    Endpoint("GET", "/v1/batches/{id}", "read"),
    Endpoint("POST", "/v1/batches/{id}/cancel", "action"),
    Endpoint("POST", "/api/v1/keys", "admin", {}),
    Endpoint("POST", "/api/v1/keys/{id}/rotate", "admin", {}),
    Endpoint("DELETE", "/api/v1/keys/{id}", "action"),
    Endpoint("GET", "/api/v1/keys", "read"),
    Endpoint("GET", "/v1/audio/voices", "read"),
    Endpoint("GET", "/v1/models", "read"),
    Endpoint("GET", "/v1/models/{model}", "read"),
    Endpoint("GET", "/v1/models/agent/{agent}", "read"),
    Endpoint("GET", "/v1/models/route/{route}", "read"),
    Endpoint("GET", "/v1/models/workflow/{workflow}", "read"),
    Endpoint("GET", "/v1/requests", "read"),
    Endpoint("GET", "/v1/requests/{id:path}", "read"),
    Endpoint("POST", "/v1/requests/{id:path}/cancel", "action"),
    Endpoint("GET", "/v1/clients", "read"),
    Endpoint("GET", "/v1/admin/figures", "read"),
    Endpoint("GET", "/v1/usage", "read"),
    Endpoint("GET", "/v1/admin/usage", "read"),
    Endpoint("GET", "/v1/admin/models", "read"),
    Endpoint("GET", "/v1/admin/models/{name}", "read"),
    Endpoint("GET", "/v1/admin/models/{name}/logs", "read"),
    Endpoint("GET", "/v1/admin/gpu-memory", "read"),
    Endpoint("GET", "/v1/admin/discovered", "read"),
    Endpoint("GET", "/v1/admin/catalog", "read"),
    Endpoint("GET", "/v1/admin/process-health", "read"),
    Endpoint("GET", "/v1/admin/join-tokens", "read"),
    Endpoint("DELETE", "/v1/admin/join-tokens/{id}", "action"),
    Endpoint("GET", "/v1/admin/operations", "read"),
    Endpoint("GET", "/v1/admin/operations/{name}", "read"),
    Endpoint("DELETE", "/v1/admin/operations/{name}", "action"),
    Endpoint("DELETE", "/v1/admin/leases/{id}", "action"),
    Endpoint("GET", "/v1/admin/audit", "read"),
    Endpoint("GET", "/v1/admin/limit-uses", "read"),
    Endpoint("GET", "/v1/admin/runners/{name}/instances", "read"),
    Endpoint("GET", "/v1/admin/tasks", "read"),
    Endpoint("GET", "/v1/admin/tasks/{id}", "read"),
    Endpoint("GET", "/v1/admin/tasks/{id}/events", "read"),
    Endpoint("POST", "/v1/admin/tasks/{id}/cancel", "action"),
    Endpoint("DELETE", "/v1/admin/tasks/{id}", "action"),
    *(Endpoint("GET", f"/api/v1/{kind}", "list") for kind in RESOURCE_KINDS),
    *(Endpoint("GET", f"/api/v1/{kind}/{{name}}", "read") for kind in RESOURCE_KINDS),
    *(Endpoint("DELETE", f"/api/v1/{kind}/{{name}}", "action") for kind in RESOURCE_KINDS if kind != "pools"),
    Endpoint("GET", "/api/v1/models/{name}/members", "read"),
    Endpoint("GET", "/api/v1/config", "read"),
    Endpoint("GET", "/api/v1/events", "read"),
    Endpoint("GET", "/api/v1/routers", "read"),
    Endpoint("GET", "/api/v1/caller", "read"),
    Endpoint("POST", "/api/v1/pdf-text", "pdf"),
    Endpoint("GET", "/api/v1/watch", "read"),
    Endpoint("GET", "/health", "read"),
    Endpoint("GET", "/livez", "read"),
    Endpoint("GET", "/healthz", "read"),
    Endpoint("GET", "/readyz", "read"),
    Endpoint("GET", "/ca.pem", "read"),
    Endpoint("GET", "/metrics", "read"),
    Endpoint("GET", "/openapi.json", "read"),
    Endpoint("GET", "/docs", "read"),
)

Send = Callable[[Endpoint], bytes]
Applies = Callable[[Endpoint], bool]


def takes_json(endpoint: Endpoint) -> bool:
    """Whether its body is JSON."""
    return endpoint.good is not None


def of_kind(*kinds: str) -> Applies:
    """The endpoints of some kinds."""
    return lambda endpoint: endpoint.kind in kinds


def everywhere(endpoint: Endpoint) -> bool:
    """Every endpoint."""
    return bool(endpoint.path)


@dataclass(frozen=True)
class Case:
    """One input, the endpoints it is sent to, and the expected statuses."""

    name: str
    send: Send
    statuses: frozenset[int] = frozenset({400})
    applies: Applies = takes_json
    in_envelope: bool = True
    """Whether the answer is an error."""


def request(
    endpoint: Endpoint, body: bytes = b"", headers: Mapping[str, str] | None = None, *, path: str = ""
) -> bytes:
    """A request on a connection of its own."""
    given = {"Host": "localhost", "Connection": "close", "Authorization": f"Bearer {SECRET}"}
    if body or endpoint.method in {"POST", "PUT"}:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    return head(f"{endpoint.method} {path or endpoint.address} HTTP/1.1", {**given, **(headers or {})}) + body


def good_body(endpoint: Endpoint) -> bytes:
    """A valid body for the endpoint."""
    return json.dumps(endpoint.good if endpoint.good is not None else {}).encode()


def later(make: Callable[[], Send]) -> Send:
    """Builds a large input when it is sent; once for the endpoints of a case."""

    def send(endpoint: Endpoint) -> bytes:
        return _made(make)(endpoint)

    return send


@lru_cache(maxsize=1)
def _made(make: Callable[[], Send]) -> Send:
    return make()


def places_of(cases: Sequence[Case]) -> dict[str, int]:
    """Returns for each case its place among those of its group, such as J3; the first one is at 0."""
    seen: Counter[str] = Counter()
    places = {}
    for case in cases:
        group = case.name.split()[0]
        places[case.name] = seen[group]
        seen[group] += 1
    return places


def share_of(index: int, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """Returns the endpoints that a case at this place is sent to, of those that it concerns.

    The first case of a group is sent to all. Of the others, which vary one fault, each goes to every EVERYth endpoint,
    another one each time.
    """
    if index == 0 or len(endpoints) <= FEW:
        return list(endpoints)
    return list(endpoints[index % EVERY :: EVERY])


def with_body(body: bytes | Callable[[Endpoint], bytes]) -> Send:
    """Send a body as JSON."""
    return lambda endpoint: request(endpoint, body(endpoint) if callable(body) else body)


def with_member(member: bytes) -> Send:
    """Send the good body with one more member, with these exact bytes."""

    def send(endpoint: Endpoint) -> bytes:
        rest = good_body(endpoint)[1:]
        return request(endpoint, b"{" + member + (b"}" if rest == b"}" else b"," + rest))

    return send


@dataclass
class Victim:
    """The process under test."""

    process: psutil.Process
    port: int
    routes: frozenset[tuple[str, str]]
    log: Path
    headers: Mapping[str, str] = field(default_factory=dict)
    resident_at_start: int = 0
    """Its memory after the first good request."""

    def endpoints(self, case: Case) -> list[Endpoint]:
        """Its endpoints that a case concerns; those of keys only if callers have one, as here in a header."""
        return [
            endpoint
            for endpoint in ENDPOINTS
            if endpoint.route in self.routes
            and case.applies(endpoint)
            and (self.headers or not endpoint.path.startswith("/api/v1/keys"))
        ]

    def exchange(self, raw: bytes) -> bytes:
        """Send, and read until the peer has closed."""
        with socket.create_connection(("127.0.0.1", self.port), ANSWER_SECONDS) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(raw)
            pieces = []
            with suppress(ConnectionResetError):
                while piece := connection.recv(65_536):
                    pieces.append(piece)
        return b"".join(pieces)

    def faults(self, case: Case, endpoint: Endpoint) -> list[str]:
        """The violations in the handling of one case; empty where there are none."""
        answer = self.exchange(case.send(endpoint))
        found = [*judge(answer, case, endpoint), *self._faults_of_log(answer, case)]
        return [f"{endpoint}: {fault}" for fault in found]

    def faults_at(self, case: Case, endpoints: Sequence[Endpoint]) -> list[str]:
        """The violations in the handling of one case at some endpoints, and in what comes after it."""
        found = [fault for endpoint in endpoints for fault in self.faults(case, endpoint)]
        return found if self.is_well() else [*found, "the next good request was not answered"]

    def is_well(self) -> bool:
        """Whether it is the same process, and answers the next good request."""
        if not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE:
            return False
        answer = self.exchange(request(ENDPOINTS[0], good_body(ENDPOINTS[0]), self.headers))
        return answer.startswith(b"HTTP/1.1 200")

    def resident_bytes(self) -> int:
        """Its memory in use."""
        return int(self.process.memory_info().rss)

    def counted(self) -> int:
        """Requests and refusals that its metrics have counted."""
        text = self.exchange(request(Endpoint("GET", "/metrics", "read"), b"", self.headers)).decode()
        counts = re.findall(r"^weft_gateway_(?:requests|refused)_total\S* (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, counts)))

    def _faults_of_log(self, answer: bytes, case: Case) -> list[str]:
        if not case.in_envelope or not answer:
            return []
        request_id = RawResponse.parse(answer).headers.get("x-request-id", "?")
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LAST_LINES_BYTES))
            count = file.read().count(f'"{request_id}"'.encode())
        return [] if count == 1 else [f"{count} log lines instead of one"]


def judge(answer: bytes, case: Case, endpoint: Endpoint) -> list[str]:
    """The violations in an answer; empty where there are none."""
    if not answer:
        return ["no answer"]
    response = RawResponse.parse(answer)
    faults = []
    if response.status not in case.statuses:
        faults.append(f"status {response.status} instead of {sorted(case.statuses)}: {response.body[:200]!r}")
    text = response.body.decode("utf-8", "replace")
    leak = _LEAKS.search(text) if case.in_envelope else None
    if leak is not None or SECRET in text:
        faults.append(f"it leaks {leak and leak[0]!r}")
    if not response.headers.get("x-request-id"):
        faults.append("no request id")
    return faults + (_faults_of_envelope(response, endpoint) if case.in_envelope else [])


def _faults_of_envelope(response: RawResponse, endpoint: Endpoint) -> list[str]:
    if endpoint.method == "HEAD":
        return []
    try:
        body = json.loads(response.body)
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if endpoint.dialect == "ollama" and isinstance(error, str):
        # Their clients read text; the machine's part is beside it.
        error = {"message": error, "type": "", "param": body.get("param"), "code": body.get("code")}
        if not error["code"]:
            return [f"the error is not typed: {sorted(body)}"]
    if not isinstance(error, dict):
        return [f"no envelope: {response.body[:100]!r}"]
    faults = [f"it has a library's words: {words!r}" for words in library_words(str(error["message"]))]
    wanted = {"message", "type", "code"} | ({"param"} if endpoint.dialect != "anthropic" else set())
    # A refusal before the path is known has the format of OpenAI's API.
    if not wanted <= set(error) or (endpoint.dialect == "anthropic") > (
        body.get("type") == "error" or "param" in error
    ):
        faults.append(f"the envelope is of another surface: {sorted(error)}")
    if body.get("request_id") != response.headers.get("x-request-id"):
        faults.append("the request id of the body is another one")
    # Likewise here, where Ollama's own answers name their charset.
    declared = {"application/json"} | ({OLLAMA_JSON.decode()} if endpoint.dialect == "ollama" else set())
    if response.headers.get("content-type") not in declared:
        faults.append("the error is not declared as JSON")
    return faults


@contextmanager
def victim(
    folder: Path, *, headers: Mapping[str, str] | None = None, keys: bool = False, patient: bool = False
) -> Iterator[Victim]:
    """A process to send bad inputs to; see `bad_inputs_server`."""
    log = folder / "victim.log"
    log.touch()
    with subprocess.Popen(
        [sys.executable, str(HERE / "bad_inputs_server.py"), str(log), *["keys"] * keys, *["patient"] * patient],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1]), os.getcwd()])},  # noqa: PTH109
    ) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            routes = frozenset((method, nameless(path)) for method, path in facts["routes"])
            found = Victim(psutil.Process(process.pid), facts["port"], routes, log, headers or {})
            assert found.is_well()
            found.resident_at_start = found.resident_bytes()
            yield found
        finally:
            process.kill()


def settle(found: Victim, most: int, seconds: float = 5.0) -> int:
    """Its memory, once it has fallen to `most`, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while (held := found.resident_bytes()) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return held
