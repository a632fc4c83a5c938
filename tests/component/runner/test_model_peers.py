"""A runner copies the files of a model from another runner of the mesh, and downloads only what nobody has."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.failures import fails
from runner_harness import RunningRunner, refusal, running_runner

from runner_svc.model_store.peers import PART_BYTES, ModelPeers, SharedModels, _loading, _parts
from runner_svc.model_store.pull import PullSettings
from runner_svc.model_store.store import ModelStore, source_digest
from runner_svc.policy.repository_files import ModelForm, RepositoryFile
from runner_svc.runner_settings import ModelStoreSettings
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, resource_pb2, runner_pb2
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.kernel.channels.rpc import new_server
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import ModelSource, parse_source
from weft_app.compose.model_sources import ModelSources
from weft_testing.model_hub import HubRepository, ModelHub

WEIGHTS = bytes(range(256)) * 12_000
OTHER_WEIGHTS = WEIGHTS[::-1]
PROJECTOR = b"projector" * 1_000
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
SOURCE = parse_source("hf:acme/tiny-GGUF:Q4_K_M", "source")
FILES = {"tiny-Q4_K_M.gguf": WEIGHTS, "mmproj-F16.gguf": PROJECTOR}


LISTED = [
    RepositoryFile(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    for path, content in FILES.items()
]


def _stored(root: Path, files: Mapping[str, bytes] = FILES, source: ModelSource = SOURCE) -> ModelStore:
    """A store that has pulled the model."""
    store = ModelStore(root)
    store.create()
    model = pb.StoredModel(main_path="tiny-Q4_K_M.gguf", quantization="Q4_K_M", revision="commit")
    for path, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        (store.partial / path).write_bytes(content)
        store.add_blob(store.partial / path, digest)
        model.files.add(path=path, size_bytes=len(content), sha256=digest)
    store.publish(source, ModelForm.GGUF, model)
    return store


class _Mesh(registry_service_pb2_grpc.RegistryServiceServicer):
    """A registry that knows the runners of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"unix:{folder}/mesh.sock"
        self._runners: dict[str, runner_pb2.Runner] = {}
        self.shown: list[pb.PullProgress] = []
        self.store = ModelStore(folder / "mine")

    async def ListResources(self, request: Any, context: Any) -> Any:  # noqa: N802 - the rpc's name
        resources = []
        for name, runner in self._runners.items():
            resource = resource_pb2.ResourceDocument(kind=request.kind, name=name)
            resource.content.Pack(runner)
            resources.append(resource)
        return registry_service_pb2.ListResourcesResponse(resources=resources)

    def add(self, name: str, address: str, *, joined: bool = False) -> None:
        active = runner_pb2.Runner.STATUS_ACTIVE
        self._runners[name] = runner_pb2.Runner(name=name, address=address, status=active, dial_out=joined)

    @property
    def peers(self) -> ModelPeers:
        return ModelPeers("mine", self.address, ChannelSecurity())

    async def copy(self, listed: Sequence[RepositoryFile] | None = None) -> pb.StoredModel | None:
        return await self.peers.copy(SOURCE, None, self.store, PullSettings(), self.shown.append, listed)

    async def pull(self, source: ModelSource = SOURCE) -> pb.StoredModel:
        sources = ModelSources(self.store, ModelStoreSettings(allow_http=True), self.peers)
        return await sources.pull(source, None, self.shown.append)

    def contents(self) -> set[bytes]:
        """What its store has, complete or not."""
        folders = self.store.root / "blobs", self.store.partial
        return {content for folder in folders for file in folder.glob("*") if (content := file.read_bytes())}


@asynccontextmanager
async def _served(address: str, *add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[None]:
    server = new_server()
    for each in add:
        each(server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@asynccontextmanager
async def _mesh(
    folder: Path,
    *,
    shares: bool = True,
    joined: bool = False,
    files: Mapping[str, bytes] = FILES,
    source: ModelSource = SOURCE,
) -> AsyncIterator[tuple[_Mesh, RunningRunner]]:
    """A mesh in which runner `ann` has the model, and the model store of another runner is empty."""
    mesh = _Mesh(folder)  # type: ignore[abstract]  # one rpc is called
    (folder / "ann").mkdir()
    shared = SharedModels(_stored(folder / "theirs", files, source), None) if shares else None
    async with AsyncExitStack() as stack:
        add = registry_service_pb2_grpc.add_RegistryServiceServicer_to_server
        await stack.enter_async_context(_served(mesh.address, lambda server: add(mesh, server)))
        ann = await stack.enter_async_context(running_runner(folder / "ann", [], shared_models=shared))
        mesh.add("ann", f"unix:{folder}/ann/runner.sock", joined=joined)
        yield mesh, ann


async def test_missing_files_are_copied_and_shown(tmp_path: Path) -> None:
    async with _mesh(tmp_path) as (mesh, _):
        copied = await mesh.copy()
    assert copied is not None
    assert {file.path for file in copied.files} == set(FILES)
    assert copied.path == "", "where it is on the other machine concerns nobody"
    for file in copied.files:
        assert mesh.store.blob(file.sha256).read_bytes() == FILES[file.path]
    assert list(mesh.store.partial.iterdir()) == []
    assert mesh.shown[0].detail.endswith(" from runner ann")


async def test_copy_goes_on_where_an_earlier_one_or_a_download_ended(tmp_path: Path) -> None:
    async with _mesh(tmp_path) as (mesh, _):
        mesh.store.create()
        (mesh.store.partial / f"sha256-{SHA256}").write_bytes(WEIGHTS[: 2 * PART_BYTES])
        asked = _Changed(tmp_path / "ann" / "runner.sock", "")  # type: ignore[abstract]  # two rpcs are called
        async with _served(f"unix:{tmp_path}/asked.sock", asked.add):
            mesh.add("ann", f"unix:{tmp_path}/asked.sock")
            assert await mesh.copy() is not None
    assert (SHA256, 2 * PART_BYTES) in asked.offsets
    assert mesh.store.blob(SHA256).read_bytes() == WEIGHTS


class _Changed(runner_service_pb2_grpc.RunnerServiceServicer):
    """Passes on what another runner sends, changed."""

    def __init__(self, socket: Path, fault: str) -> None:
        self._socket = socket
        self._fault = fault
        self.offsets: list[tuple[str, int]] = []

    def add(self, server: grpc.aio.Server) -> None:
        runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(self, server)

    async def FindStoredModel(self, request: Any, context: Any) -> Any:  # noqa: N802 - the rpc's name
        async with grpc.aio.insecure_channel(f"unix:{self._socket}") as channel:
            stub: Any = runner_service_pb2_grpc.RunnerServiceStub(channel)
            found = await stub.FindStoredModel(request)
        if self._fault == "path":
            found.model.files[0].path = "../../outside.gguf"
        return found

    async def ReadModelFile(  # noqa: N802 - the rpc's name
        self, request: Any, context: Any
    ) -> AsyncGenerator[runner_service_pb2.ReadModelFileResponse]:
        self.offsets.append((request.sha256, request.offset))
        async with grpc.aio.insecure_channel(f"unix:{self._socket}") as channel:
            stub: Any = runner_service_pb2_grpc.RunnerServiceStub(channel)
            async for message in stub.ReadModelFile(request):
                if self._fault == "cut":
                    yield runner_service_pb2.ReadModelFileResponse(content=message.content[:100])
                    return
                if self._fault == "changed":
                    message.content = bytes([message.content[0] ^ 1]) + message.content[1:]
                yield message
                if self._fault == "too long":
                    yield message


@pytest.mark.parametrize(
    ("fault", "left"), [("changed", []), ("too long", []), ("cut", [f"sha256-{SHA256}"]), ("path", [])]
)
async def test_damaged_copy_is_discarded_and_the_next_runner_is_asked(
    tmp_path: Path, fault: str, left: list[str]
) -> None:
    async with _mesh(tmp_path) as (mesh, _):
        socket = f"unix:{tmp_path}/changed.sock"
        changed = _Changed(tmp_path / "ann" / "runner.sock", fault)  # type: ignore[abstract]  # two rpcs are called
        async with _served(socket, changed.add):
            mesh.add("ann", socket)
            mesh.store.create()
            assert await mesh.copy() is None
            assert [file.name for file in mesh.store.partial.iterdir()] == left
            assert not mesh.store.blob(SHA256).exists()
            mesh.add("bob", f"unix:{tmp_path}/ann/runner.sock")
            assert await mesh.copy() is not None
    assert mesh.store.blob(SHA256).read_bytes() == WEIGHTS


async def test_runner_that_shares_nothing_is_passed_over(tmp_path: Path) -> None:
    async with _mesh(tmp_path, shares=False) as (mesh, ann):
        request = runner_service_pb2.FindStoredModelRequest(source_digest=source_digest(SOURCE))
        assert (await refusal(ann.control.FindStoredModel(request))).reason is Reason.UNSUPPORTED_OPERATION
        assert await mesh.copy() is None
    assert mesh.shown == []


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"sha256": "../theirs", "offset": 0}, Reason.INVALID_ARGUMENT),
        ({"sha256": SHA256, "offset": -1}, Reason.INVALID_ARGUMENT),
        ({"sha256": "0" * 64, "offset": 0}, Reason.NOT_FOUND),
    ],
)
async def test_only_stored_files_are_read_by_their_digest(
    tmp_path: Path, request_: dict[str, Any], reason: Reason
) -> None:
    async with _mesh(tmp_path) as (_, ann):
        error = await refusal(ann.control.ReadModelFile(runner_service_pb2.ReadModelFileRequest(**request_)).read())
        assert error.reason is reason


async def test_source_that_is_not_shared_is_neither_found_nor_read(tmp_path: Path) -> None:
    store = _stored(tmp_path)
    other = SharedModels(store, None, only=frozenset({source_digest(parse_source("hf:acme/other-GGUF", "source"))}))
    with fails(Reason.NOT_FOUND):
        await other.find(source_digest(SOURCE), None)
    with fails(Reason.NOT_FOUND):
        await anext(other.read(SHA256, 0))
    own = SharedModels(store, None, only=frozenset({source_digest(SOURCE)}))
    assert (await own.find(source_digest(SOURCE), None)).quantization == "Q4_K_M"
    assert b"".join([part async for part in own.read(SHA256, 0)]) == WEIGHTS


async def test_files_are_sent_at_most_at_the_configured_rate(tmp_path: Path) -> None:
    clock = _Steps()
    shared = SharedModels(_stored(tmp_path), PART_BYTES, clock)  # type: ignore[arg-type]
    async for _ in shared.read(SHA256, 0):
        pass
    assert clock.now == pytest.approx(len(WEIGHTS) // PART_BYTES)


@pytest.mark.parametrize(("pause", "is_slow"), [(0.5, False), (29.0, True)])
async def test_copy_from_a_runner_that_sends_little_by_little_ends(pause: float, is_slow: bool) -> None:
    clock = _Steps()

    async def call() -> AsyncIterator[runner_service_pb2.ReadModelFileResponse]:
        for _ in range(1_000):
            await clock.sleep(pause)
            yield runner_service_pb2.ReadModelFileResponse(content=b"x" * (1 if is_slow else 16_384))

    async def read() -> int:
        return len([part async for part in _parts(call(), clock)])  # type: ignore[arg-type]

    if is_slow:
        with pytest.raises(TimeoutError, match="bytes/s"):
            await read()
        assert clock.now < 90.0
    else:
        assert await read() == 1_000


class _Steps:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def _no_internet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_TOKEN", "")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    hub.repositories["acme/tiny-GGUF"] = HubRepository(files=dict(FILES))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "")
    with hub.running():
        yield hub


async def test_listed_files_alone_are_copied_and_from_a_joined_machine_too(tmp_path: Path) -> None:
    async with _mesh(tmp_path, joined=True) as (mesh, _):
        assert await mesh.copy(LISTED[:1]) is None
        assert mesh.contents() == {WEIGHTS}
        assert list(mesh.store.partial.iterdir()) == []


@pytest.mark.parametrize("fault", ["digest", "size"])
async def test_file_with_another_digest_or_size_than_listed_is_refused_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    listed = replace(LISTED[0], size_bytes=7) if fault == "size" else replace(LISTED[0], sha256="0" * 64)
    async with _mesh(tmp_path) as (mesh, _):
        await mesh.copy([listed])
        assert mesh.contents() == set()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "copy of a model file was refused" in line]
    assert "tiny-Q4_K_M.gguf is not the file that the source lists" in line
    assert "ann" in line


@pytest.mark.slow("pulls in another process")
async def test_hub_is_asked_before_any_runner(tmp_path: Path, hub: ModelHub) -> None:
    """A runner's copy filled the disk before the hub said that there is no such model."""
    del hub.repositories["acme/tiny-GGUF"]
    async with _mesh(tmp_path) as (mesh, _):
        with fails(Reason.NOT_FOUND):
            await mesh.pull()
        assert mesh.contents() == set()


@pytest.mark.slow("pulls in another process")
async def test_copy_that_differs_from_the_listing_of_the_hub_is_refused_and_downloaded(
    tmp_path: Path, hub: ModelHub
) -> None:
    async with _mesh(tmp_path, files=FILES | {"tiny-Q4_K_M.gguf": OTHER_WEIGHTS}, joined=True) as (mesh, _):
        model = await mesh.pull()
        assert mesh.contents() == {WEIGHTS, PROJECTOR}
    assert (model.revision, model.copied_from) == (hub.repositories["acme/tiny-GGUF"].commit, "")
    assert len(hub.requested("GET", "/api/models/acme/tiny-GGUF")) == 1
    assert all("mmproj" not in request.path for request in hub.requests), "the copy of this one is right"


@pytest.mark.slow("pulls in another process")
async def test_runner_is_not_trusted_if_the_hub_fails_after_its_listing(tmp_path: Path, hub: ModelHub) -> None:
    hub.faults.statuses = [405]
    async with _mesh(tmp_path, files=FILES | {"tiny-Q4_K_M.gguf": OTHER_WEIGHTS}) as (mesh, _):
        with fails(Reason.SERVICE_UNAVAILABLE):
            await mesh.pull()
        assert mesh.contents() == {PROJECTOR}


@pytest.mark.slow("pulls in another process")
async def test_copy_made_without_the_hub_is_checked_by_the_next_pull(
    tmp_path: Path, hub: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _mesh(tmp_path, files=FILES | {"tiny-Q4_K_M.gguf": OTHER_WEIGHTS}) as (mesh, _):
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        unchecked = await mesh.pull()
        assert (unchecked.copied_from, mesh.store.path_of(unchecked).read_bytes()) == ("ann", OTHER_WEIGHTS)
        # What the other runner says of the revision cannot pass for a check.
        unchecked.revision = hub.repositories["acme/tiny-GGUF"].commit
        mesh.store.publish(SOURCE, ModelForm.GGUF, unchecked)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        checked = await mesh.pull()
    assert (checked.copied_from, mesh.store.path_of(checked).read_bytes()) == ("", WEIGHTS)


@pytest.mark.slow("pulls in another process")
async def test_pull_downloads_only_what_no_runner_has(tmp_path: Path, hub: ModelHub) -> None:
    hub.repositories["acme/tiny-GGUF"].files["mmproj-F16.gguf"] = b"newer" * 1_000
    async with _mesh(tmp_path) as (mesh, _):
        model = await mesh.pull()
    assert model.revision == hub.repositories["acme/tiny-GGUF"].commit
    content = [request for request in hub.requests if request.method == "GET" and "gguf" in request.path]
    assert all("mmproj" in request.path for request in content)
    assert mesh.store.is_whole(model)


@pytest.mark.slow("pulls in another process")
@pytest.mark.usefixtures("_no_internet")
async def test_pull_works_without_internet_if_another_runner_has_the_model(tmp_path: Path) -> None:
    async with _mesh(tmp_path) as (mesh, _):
        model = await mesh.pull()
        assert (model.revision, model.quantization, model.copied_from) == ("commit", "Q4_K_M", "ann")
        assert mesh.store.find(SOURCE) is not None
        assert mesh.store.path_of(model).read_bytes() == WEIGHTS


@pytest.mark.slow("pulls in another process")
@pytest.mark.usefixtures("_no_internet")
@pytest.mark.parametrize(("shares", "joined"), [(False, False), (True, True)])
async def test_pull_without_internet_fails_if_no_runner_of_the_mesh_itself_has_the_model(
    tmp_path: Path, shares: bool, joined: bool
) -> None:
    async with _mesh(tmp_path, shares=shares, joined=joined) as (mesh, _):
        with fails(Reason.SERVICE_UNAVAILABLE):
            await mesh.pull()
        assert mesh.contents() == set()


@pytest.mark.slow("pulls in another process")
@pytest.mark.parametrize("file", ["tiny.gguf", "tiny-1.0-py3-none-any.whl"])
async def test_copy_without_the_digest_that_its_source_states_is_not_used(
    tmp_path: Path, hub: ModelHub, file: str
) -> None:
    """Regression: only the digest that the other runner stated was checked, and none for a model in a wheel."""
    stated = parse_source(f"{hub.url}/files/{file}#sha256={'0' * 64}", "source")
    hub.files[file], hub.faults.statuses = b"", [405]
    async with _mesh(tmp_path, source=stated) as (mesh, _):
        with fails(Reason.SERVICE_UNAVAILABLE):
            await mesh.pull(stated)
        assert mesh.contents() == set()


@pytest.mark.slow("pulls in another process")
async def test_file_whose_digest_is_in_its_url_is_copied_without_the_server(tmp_path: Path) -> None:
    stated = parse_source(f"http://127.0.0.1:1/tiny-Q4_K_M.gguf#sha256={SHA256}", "source")
    async with _mesh(tmp_path, source=stated, joined=True) as (mesh, _):
        model = await mesh.pull(stated)
        assert mesh.store.path_of(model).read_bytes() == WEIGHTS
    assert (model.copied_from, model.quantization) == ("", "Q4_K_M")


async def test_cancelled_copy_stops_waiting_for_the_pull_of_another_process(tmp_path: Path) -> None:
    """Its thread waited on for the lock, and the runner could not end until that pull had."""
    store, loop, waits = ModelStore(tmp_path), asyncio.get_running_loop(), asyncio.Event()
    store.create()

    def note_waiting() -> None:
        loop.call_soon_threadsafe(waits.set)

    async def enter() -> None:
        async with _loading(store, "file", note_waiting):
            raise AssertionError("another process has the lock")

    with store.loading("file", lambda: None):
        entering = asyncio.create_task(enter())
        await waits.wait()
        entering.cancel()
        await asyncio.wait([entering])
        await asyncio.wait_for(loop.shutdown_default_executor(), 5.0)
