"""A gateway with a scripted dispatcher, and a client that sends bytes."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from kit.keys import bearer
from kit.steps import done
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from registry_script import ScriptedRegistry

from gateway.admin.admin_operations import AdminPorts
from gateway.admin.join_tokens import JoinCommands
from gateway.app import app_over, gateway_deps
from gateway.auth.authentication import KeyRingSource
from gateway.gateway_config import GatewayConfig
from gateway.gateway_service import GatewayService, build
from gateway.media import MediaSource
from gateway.ports import GatewayPorts
from gateway.registry_client import RegistryClient, RegistryService
from gateway.routing import EdgeApp
from gateway.watch.source import WatchSource
from gateway.workbench.page_files import PageFiles
from weft.api.common.v1 import embedding_pb2, event_pb2, receipt_pb2, sampling_pb2, usage_pb2
from weft.api.registry.v1 import agent_pb2
from weft.dispatch.call import Call, RequestDispatcher
from weft.dispatch.fleet import FleetSource, FleetView, ModelView
from weft.dispatch.operation_table import ChunkT, OperationSpec, PayloadT, SpeechPiece
from weft.dispatch.quoter import Quoter
from weft.dispatch.remote_router import RouterSource
from weft.dispatch.request_receipt import RequestContext
from weft.durable.batches import BatchClient, FileClient
from weft.durable.requests import RequestClient
from weft.durable.responses import ResponseClient
from weft.durable.tasks import TaskClient
from weft.durable.usage import UsageClient
from weft.extension import own_extensions
from weft.kernel.requests.request_values import Operation
from weft.kernel.services.health import HealthSource
from weft.kernel.time.clock import Clock

Frame = list[event_pb2.InferenceEvent]
Step = Frame | Exception | asyncio.Event


def delta(text: str = "", *, index: int = 0, finish: str = "", **fields: object) -> event_pb2.InferenceEvent:
    """An event with a chunk of an answer; `finish` is a finish reason's name, such as "STOP"."""
    piece = event_pb2.Delta(index=index, text=text, **fields)  # type: ignore[arg-type]
    if finish:
        piece.finish_reason = event_pb2.FinishReason.Value(f"FINISH_REASON_{finish}")
    return event_pb2.InferenceEvent(delta=piece)


def usage(prompt: int = 7, completion: int = 3, cached: int = 0, reasoning: int = 0) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(
        usage=usage_pb2.Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_prompt_tokens=cached,
            reasoning_tokens=reasoning,
        )
    )


def finished() -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=sample_receipt()))


def sample_receipt() -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED, model="tiny")
    receipt.queue_wait.FromMilliseconds(150)
    receipt.gpu_time.FromMilliseconds(450)
    receipt.usage.prompt_tokens = 7
    receipt.usage.completion_tokens = 3
    receipt.usage.cached_prompt_tokens = 5
    return receipt


def started(model: str = "tiny") -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(started=event_pb2.Started(runner="r1", model=model, attempt=1))


def queued(position: int = 3, reason: str = "every slot is taken") -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(queued=event_pb2.Queued(position=position, reason=reason))


def hello() -> list[Step]:
    """A complete answer: Hello, world."""
    return [
        [started()],
        [delta("Hello")],
        [delta(", "), delta("world")],
        [delta(finish="STOP"), usage(cached=5), finished()],
    ]


@dataclass
class ScriptedDispatcher(RequestDispatcher):
    """Answers every generation with `steps` and every embedding with `vectors`; records the requests.

    Other unary answers are `whole`, and a recording is `spoken`. A step is a chunk, an error, or an event to wait for.
    """

    steps: list[Step] = field(default_factory=hello)
    vectors: list[list[float]] | Exception | asyncio.Event = field(default_factory=list)
    calls: list[Call[Any]] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_closed: asyncio.Event = field(default_factory=asyncio.Event)
    whole: Any = None
    spoken: list[SpeechPiece | Exception | asyncio.Event] = field(default_factory=list)

    @property
    def contexts(self) -> list[RequestContext]:
        return [call.context for call in self.calls]

    @property
    def payloads(self) -> list[Any]:
        return [call.payload for call in self.calls]

    def call(
        self, spec: OperationSpec[PayloadT, ChunkT], context: RequestContext, payload: PayloadT, *, whole: bool = False
    ) -> Call[ChunkT]:
        return Call(spec, context, payload, self._run, whole=whole)

    def script_of(self, call: Call[Any]) -> Sequence[Any]:
        """The steps that answer a call."""
        match call.spec.operation:
            case Operation.CHAT | Operation.COMPLETION | Operation.IMAGE | Operation.TRANSCRIPTION:
                return self.steps
            case Operation.SPEECH:
                return self.spoken
            case Operation.EMBEDDING if isinstance(self.vectors, list):
                return [embeddings(self.vectors)]
            case Operation.EMBEDDING:
                return [self.vectors, []]
            case _:
                return [self.whole, self.whole] if isinstance(self.whole, asyncio.Event) else [self.whole]

    def receipt(self) -> receipt_pb2.Receipt:
        return sample_receipt()

    def note(self, call: Call[Any]) -> None:
        self.calls.append(call)
        self.was_asked.set()

    async def _run(self, call: Call[Any], /) -> AsyncGenerator[Any]:
        self.note(call)
        try:
            async for step in done(self.script_of(call)):
                yield step
            call.receipt = self.receipt()
        finally:
            self.was_closed.set()


def embeddings(vectors: list[list[float]]) -> list[embedding_pb2.Embedding]:
    return [embedding_pb2.Embedding(index=index, values=values) for index, values in enumerate(vectors)]


def model(
    name: str,
    *,
    pool: str = "",
    active: bool = True,
    hibernating: bool = False,
    failed: bool = False,
    context_tokens: int = 4096,
) -> ModelView:
    return ModelView(
        name=name,
        pool=pool or name,
        runner="r1",
        operations=frozenset({Operation.CHAT}),
        remote=False,
        active=active,
        context_tokens=context_tokens,
        created_at_seconds=1_700_000_000,
        hibernating=hibernating,
        failed=failed,
    )


def agent(name: str, target: str = "tiny", *, prompt: str = "Be terse.", **defaults: float) -> agent_pb2.Agent:
    manifest = agent_pb2.AgentManifest(
        name=name,
        model=target,
        system_prompt=prompt,
        default_params=sampling_pb2.SamplingParams(**defaults),  # type: ignore[arg-type]
        description="Reviews code",
    )
    return agent_pb2.Agent(manifest=manifest, create_time=Timestamp(seconds=1_700_000_001))


@dataclass
class FixedFleet:
    view: FleetView

    @classmethod
    def of(cls, *models: ModelView, agents: Sequence[agent_pb2.Agent] = (), revision: int = 1) -> "FixedFleet":
        return cls(
            FleetView(
                revision, {}, {entry.name: entry for entry in models}, {entry.manifest.name: entry for entry in agents}
            )
        )


@dataclass
class RunningGateway:
    service: GatewayService
    dispatcher: ScriptedDispatcher
    sdk: AsyncOpenAI

    async def request(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, *, key: str = ""
    ) -> "RawResponse":
        """One request on a connection of its own; a body that is no bytes is sent as JSON. `key`: its id."""
        given = {"Host": f"127.0.0.1:{self.service.port}", "Connection": "close", **bearer(key), **(headers or {})}
        if raw := as_bytes(body):
            given = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **given}
        return await self.exchange(head(f"{method} {path} HTTP/1.1", given) + raw)

    async def read(self, path: str, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of a GET that succeeds."""
        return (await self.request("GET", path, headers=headers)).of(200)

    async def exchange(self, raw: bytes) -> "RawResponse":
        """Send bytes, read until the gateway closes."""
        async with self.connection() as (reader, writer):
            writer.write(raw)
            return RawResponse.parse(await reader.read())

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            await asyncio.wait({asyncio.create_task(ignoring_reset(writer))})

    def post(self, path: str, body: object) -> bytes:
        """The bytes of a POST that keeps its connection."""
        raw = as_bytes(body)
        given = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(raw))}
        return head(f"POST {path} HTTP/1.1", given) + raw


def as_bytes(body: object) -> bytes:
    """None is no body."""
    if body is None or isinstance(body, bytes):
        return body or b""
    return json.dumps(body).encode()


async def ignoring_reset(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


def head(first_line: str, headers: Mapping[str, str]) -> bytes:
    lines = [first_line, *(f"{name}: {value}" for name, value in headers.items())]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1")


@dataclass(frozen=True)
class RawResponse:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def refusal(self) -> tuple[int, str, str | None]:
        """The status of an error, its code, and the field that it names."""
        return self.status, self.error["code"], self.error["param"]

    def of(self, status: int) -> Any:
        """The JSON of an answer that must have this status."""
        assert self.status == status, self
        return self.json

    @classmethod
    def parse(cls, raw: bytes) -> "RawResponse":
        top, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = top.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = unchunked(body)
        return cls(int(first.split()[1]), headers, body)


def unchunked(raw: bytes) -> bytes:
    """The content of a chunked body, also of a truncated one."""
    content = b""
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        content += rest[: int(size, 16)]
        raw = rest[int(size, 16) + 2 :]
    return content


def app_of(config: GatewayConfig, ports: GatewayPorts) -> EdgeApp:
    """The application of a gateway alone."""
    return app_over(gateway_deps(config, ports), ports)


def _service(stub: object | None) -> RegistryService | None:
    return None if stub is None else RegistryService(stub, timeout_seconds=5.0)


WORKBENCH = PageFiles(pages=[page for each in own_extensions() for page in each.pages])
"""The workbench that a running gateway serves."""


@asynccontextmanager
async def serving(
    dispatcher: RequestDispatcher | None = None,
    *,
    config: GatewayConfig | None = None,
    fleet: FleetSource | None = None,
    registry: RegistryClient | None = None,
    admin: AdminPorts | None = None,
    requests: RequestClient | None = None,
    keys: KeyRingSource | None = None,
    api_keys: object | None = None,
    secrets: object | None = None,
    captures: object | None = None,
    trials: object | None = None,
    join_tokens: object | None = None,
    join_command: JoinCommands = lambda _token: None,
    media: MediaSource | None = None,
    responses: ResponseClient | None = None,
    files: FileClient | None = None,
    result_key: bytes | None = None,
    batches: BatchClient | None = None,
    tasks: TaskClient | None = None,
    usage_source: UsageClient | None = None,
    quotes: Quoter | None = None,
    router: RouterSource | None = None,
    health: HealthSource | None = None,
    watched: Sequence[WatchSource] = (),
    clock: Clock | None = None,
    **more: Any,
) -> AsyncIterator[RunningGateway]:
    """A running gateway and an SDK client that does not retry. Keys, secrets and join tokens are stubs of services.

    `more`: fields of GatewayPorts.
    """
    script = dispatcher or ScriptedDispatcher()
    ports = GatewayPorts(
        extensions=own_extensions(),
        dispatcher=script,
        fleet=fleet or FixedFleet.of(model("tiny"), model("small", pool="chat")),
        registry=registry or ScriptedRegistry(),
        admin=admin,
        requests=requests,
        keys=keys,
        api_keys=_service(api_keys),
        secrets=_service(secrets),
        captures=_service(captures),
        trials=_service(trials),
        join_tokens=_service(join_tokens),
        join_command=join_command,
        media=media,
        responses=responses,
        files=files,
        result_key=result_key,
        batches=batches,
        tasks=tasks,
        usage=usage_source,
        quotes=quotes,
        router=router,
        health=health or HealthSource(),
        watched=watched,
        **more,
    )
    service = build(config or GatewayConfig(port=0), ports, clock=clock)
    await service.start()
    try:
        # Plain HTTP verifies no certificate; reading the trust store takes longer than most tests.
        http = DefaultAsyncHttpxClient(verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0, http_client=http) as sdk:
            yield RunningGateway(service, script, sdk)  # type: ignore[arg-type]  # a test knows which it gave
    finally:
        await service.stop(grace_seconds=0.0)
