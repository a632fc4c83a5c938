"""The models and servers that a runner serves by their source: bound, kept in a file, served again, removed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from kit.engines import fake_model
from kit.failures import fails
from runner_harness import running_runner

from runner_svc.added_models import AddedModels, AddRequest, ShowPull, added_model
from runner_svc.added_models_file import SUFFIX, LeftBehind, models_left_behind, remembered_models
from runner_svc.backend.port import Backend
from runner_svc.followed_servers import FollowedServer, FollowedServers
from runner_svc.instance.instance_settings import HibernationSettings, ServedModel
from runner_svc.policy.followed_models import FollowedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.model_names import ListedModels, ServerList
from runner_svc.policy.model_sizing import MachineMemory
from runner_svc.policy.repository_files import ModelForm
from weft.api.runner.v1 import added_model_pb2, load_pb2, model_store_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter
from weft.kernel.models.model_source import ModelSource, server_location
from weft_testing.fake_clock import FakeClock

SOURCE = "hf:acme/tiny-GGUF:Q4_0"
NOTHING = load_pb2.LoadOptions()


def _hide(_: model_store_pb2.PullProgress) -> None:
    """A ShowPull that shows nothing."""


def _followed(name: str, url: str) -> FollowedServer:
    """A server that lists no models."""

    async def list_models(max_age_seconds: float) -> ServerList:
        del max_age_seconds
        return ServerList(models=ListedModels(names=()))

    def serve(model: FollowedModel) -> ServedModel:
        raise AssertionError(f"{model.name} is listed nowhere")

    return FollowedServer(
        name=name, location=server_location(url), list_models=list_models, serve=serve, most=4, interval_seconds=5.0
    )


def _server_of(added: added_model_pb2.AddedModel) -> FollowedServer:
    return _followed(added.name, added.stored_source)


def _no_backend() -> Backend:
    raise AssertionError("nothing is loaded here")


@dataclass
class FakeAdder:
    """See ModelAdder: every source is there."""

    prepared: list[AddRequest] = field(default_factory=list)
    failure: WeftError | None = None

    async def pull(self, source: ModelSource, form: ModelForm | None, show: ShowPull) -> model_store_pb2.StoredModel:
        raise AssertionError("nothing is pulled here")

    async def prepare(self, request: AddRequest, show: ShowPull) -> ServedModel:
        self.prepared.append(request)
        if self.failure is not None:
            raise self.failure
        return self.restored(added_model(request))

    def load_parameters(self, source: ModelSource) -> list[Sequence[LoadParameter]]:
        raise AssertionError("no parameters are set here")

    def restored(self, added: added_model_pb2.AddedModel) -> ServedModel:
        if self.failure is not None:
            raise self.failure
        return ServedModel(name=added.name, make_backend=_no_backend, operations=frozenset(), added=added)


@dataclass
class FakeHost:
    """See ModelHost: one model of its configuration, "configured"."""

    served: dict[str, ServedModel | None] = field(default_factory=lambda: {"configured": None})

    def is_served(self, name: str) -> bool:
        return name in self.served

    async def machine_memory(self) -> MachineMemory:
        return MachineMemory()

    async def serve(self, model: ServedModel) -> None:
        self.served[model.name] = model

    def withdraw(self, name: str) -> None:
        del self.served[name]

    async def remove(self, name: str) -> int:
        return 7 if self.served.pop(name, None) is not None else 0


@dataclass
class Runner:
    """A runner's added models, and what they stand on."""

    file: Path
    max_models: int = 2
    adder: FakeAdder = field(default_factory=FakeAdder)
    host: FakeHost = field(default_factory=FakeHost)

    def __post_init__(self) -> None:
        self.followed = FollowedServers(self.host, FakeClock())
        self.models = AddedModels(self.adder, self.host, self.file, self.followed, _server_of, self.max_models)

    def again(self) -> "Runner":
        """The next life of the runner, on the same file."""
        return replace(self, adder=FakeAdder(), host=FakeHost())

    async def add(self, name: str = "tiny", source: str = SOURCE) -> added_model_pb2.AddedModel:
        return await self.models.add(source, name, NOTHING, _hide)


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    made = Runner(tmp_path / f"local{SUFFIX}")
    yield made
    await made.followed.stop()


async def test_added_model_is_served_again_after_a_restart(runner: Runner) -> None:
    added = await runner.add()
    assert (added.name, added.source) == ("tiny", SOURCE)
    later = runner.again()
    await later.models.restore()
    assert set(later.host.served) == {"configured", "tiny"}
    assert later.adder.prepared == []
    assert [each.name for each in remembered_models(runner.file.parent)] == ["tiny"]


async def test_models_of_a_runner_removed_from_the_config_are_found(runner: Runner) -> None:
    await runner.add("tiny")
    await runner.add("other", f"{SOURCE}-other")
    folder = runner.file.parent
    (folder / f"empty{SUFFIX}").write_text("{}")
    (folder / f"broken{SUFFIX}").write_text("no JSON")
    assert models_left_behind(folder, {"gpu"}) == [
        LeftBehind(runner="local", models=["tiny", "other"], file=runner.file)
    ]
    assert models_left_behind(folder, {"gpu", "local"}) == []


async def test_models_added_to_another_runner_since_are_not_reported_as_left_behind(
    runner: Runner, tmp_path: Path
) -> None:
    """Each start warned of them for ever, whatever its reader did."""
    await runner.add("tiny")
    await runner.add("other", f"{SOURCE}-other")
    gpu = Runner(tmp_path / f"gpu{SUFFIX}")
    await gpu.add("tiny")
    assert [left.models for left in models_left_behind(tmp_path, {"gpu"})] == [["other"]]
    await gpu.add("other", f"{SOURCE}-other")
    assert models_left_behind(tmp_path, {"gpu"}) == []


async def test_same_source_under_the_same_name_is_added_once(runner: Runner) -> None:
    await runner.add()
    await runner.add()
    assert len(runner.adder.prepared) == 1


@pytest.mark.parametrize(("name", "source"), [("tiny", "hf:acme/other"), ("configured", SOURCE)])
async def test_name_of_another_model_is_rejected(runner: Runner, name: str, source: str) -> None:
    await runner.add()
    with fails(Reason.ALREADY_EXISTS, match="is taken"):
        await runner.add(name, source)


async def test_name_of_an_attached_server_is_rejected_for_a_model(runner: Runner) -> None:
    """Regression: the model took the place of the server's record, and the server could not be detached any more."""
    await runner.add("box", "http://localhost:11434")
    with fails(Reason.ALREADY_EXISTS, match="is taken"):
        await runner.add("box")
    assert runner.models.servers == ["box"]


async def test_name_of_a_model_that_is_being_added_is_rejected_for_a_server(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_go, prepare = asyncio.Event(), asyncio.Event(), runner.adder.prepare

    async def slow(request: AddRequest, show: ShowPull) -> ServedModel:
        asked.set()
        await may_go.wait()
        return await prepare(request, show)

    monkeypatch.setattr(runner.adder, "prepare", slow)
    adding = asyncio.create_task(runner.add("box"))
    await asked.wait()
    attaching = asyncio.create_task(runner.add("box", "http://localhost:11434"))
    await asyncio.sleep(0)
    may_go.set()
    assert (await adding).name == "box"
    with fails(Reason.ALREADY_EXISTS, match="is taken"):
        await attaching


async def test_models_over_the_limit_are_rejected_until_one_is_removed(runner: Runner) -> None:
    await runner.add("a")
    await runner.add("b")
    with fails(Reason.TOO_MANY_RESOURCES, match="already has 2 added models"):
        await runner.add("c")
    await runner.models.remove("a")
    await runner.add("c")
    assert set(runner.host.served) == {"configured", "b", "c"}


async def test_removed_model_is_not_served_after_a_restart(runner: Runner) -> None:
    await runner.add()
    model, freed = await runner.models.remove("tiny")
    assert (model.name, freed) == ("tiny", 7)
    later = runner.again()
    await later.models.restore()
    assert set(later.host.served) == {"configured"}


@pytest.mark.parametrize(("name", "reason"), [("configured", Reason.INVALID_ARGUMENT), ("no", Reason.MODEL_NOT_FOUND)])
async def test_removing_a_model_that_was_not_added_is_rejected(runner: Runner, name: str, reason: Reason) -> None:
    with fails(reason):
        await runner.models.remove(name)
    assert "configured" in runner.host.served


async def test_model_that_cannot_be_prepared_is_not_saved(runner: Runner) -> None:
    runner.adder.failure = WeftError(Reason.UNSUPPORTED_OPERATION, "no engine")
    with pytest.raises(WeftError, match="no engine"):
        await runner.add()
    assert not runner.file.exists()
    runner.adder.failure = None
    await runner.add()


async def test_model_that_cannot_be_saved_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "nowhere").write_text("no folder", "utf-8")
    homeless = Runner(tmp_path / "nowhere" / f"local{SUFFIX}")
    with pytest.raises(WeftError, match="nothing was changed"):
        await homeless.add()
    assert set(homeless.host.served) == {"configured"}


async def test_model_that_cannot_be_served_now_remains_in_the_file(runner: Runner) -> None:
    await runner.add("a")
    await runner.add("b")
    later = runner.again()
    later.adder.failure = WeftError(Reason.INVALID_ARGUMENT, "its runtime is gone")
    await later.models.restore()
    assert set(later.host.served) == {"configured"}
    await later.models.remove("a")
    last = later.again()
    await last.models.restore()
    assert set(last.host.served) == {"configured", "b"}


async def test_model_that_is_added_again_or_removed_is_left_out_no_longer(runner: Runner) -> None:
    await runner.add("a")
    await runner.add("b")
    later = runner.again()
    later.adder.failure = WeftError(Reason.INVALID_ARGUMENT, "its runtime is gone")
    await later.models.restore()
    assert [(item.name, item.message) for item in later.models.left_out] == [
        ("a", "its runtime is gone"),
        ("b", "its runtime is gone"),
    ]
    later.adder.failure = None
    await later.add("a")
    await later.models.remove("b")
    await later.add("b")
    assert later.models.left_out == []


@pytest.mark.parametrize("content", ["{", '{"schemaVersion": 99, "models": []}', '{"models": 7}'])
async def test_unreadable_file_is_moved_aside(runner: Runner, content: str) -> None:
    runner.file.write_text(content, "utf-8")
    await runner.models.restore()
    assert runner.file.with_suffix(".unreadable").read_text("utf-8") == content
    await runner.add()
    assert [model["name"] for model in json.loads(runner.file.read_text("utf-8"))["models"]] == ["tiny"]


async def test_url_query_is_saved_and_not_shown(runner: Runner) -> None:
    source = "https://host/model.gguf?token=hidden"
    added = await runner.add("m", source)
    assert "hidden" not in added.source
    assert "hidden" in runner.file.read_text("utf-8")
    model, _ = await runner.models.remove("m")
    assert "hidden" not in str(model)


OTHER_SPELLINGS = [
    "http://127.0.0.1:11434/",
    "http://localhost:11434/v1",
    "http://LOCALHOST:11434",
    "http://[::1]:11434",
]


@pytest.mark.parametrize("url", OTHER_SPELLINGS)
async def test_server_under_another_address_spelling_counts_as_attached(runner: Runner, url: str) -> None:
    """It was attached twice, and each of its models served twice."""
    assert (await runner.add("ollama", "http://localhost:11434")).name == "ollama"
    with fails(Reason.ALREADY_EXISTS) as refused:
        await runner.add("ollama-2", url)
    assert refused.value.message == "the server is already attached, as ollama"
    assert (await runner.add("ollama", url)).name == "ollama", "under its name that is no error"
    assert runner.followed.names == ("ollama",)


@pytest.mark.parametrize("url", OTHER_SPELLINGS)
async def test_configured_server_is_not_attached_twice(runner: Runner, url: str) -> None:
    await runner.followed.follow(_followed("box", "http://localhost:11434"))
    with pytest.raises(WeftError) as refused:
        await runner.add("ollama", url)
    assert refused.value.message == "the configuration already has this server, as box"


@pytest.mark.parametrize("url", ["http://localhost:11435", "http://localhost:11434/x/v1"])
async def test_another_port_or_path_of_the_same_machine_is_a_different_server(runner: Runner, url: str) -> None:
    await runner.add("one", "http://localhost:11434")
    assert (await runner.add("other", url)).name == "other"


async def test_server_whose_attaching_was_cancelled_can_be_attached_again(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt was told that the configuration already has this server."""
    asked = asyncio.Event()

    async def hang(max_age_seconds: float) -> ServerList:
        del max_age_seconds
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    def hanging(added: added_model_pb2.AddedModel) -> FollowedServer:
        return replace(_server_of(added), list_models=hang)

    monkeypatch.setattr(runner.models, "_server_of", hanging)
    attaching = asyncio.create_task(runner.add("ollama", "http://localhost:11434"))
    await asked.wait()
    attaching.cancel()
    await asyncio.wait([attaching])
    monkeypatch.setattr(runner.models, "_server_of", _server_of)
    assert (await runner.add("ollama", "http://localhost:11434")).name == "ollama"


async def test_models_added_at_the_same_time_are_all_saved(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was written by a thread for each, and an earlier list could replace a later one."""
    writes: list[asyncio.Event] = []

    async def delayed(work: Callable[..., None], *arguments: object) -> None:
        writes.append(allowed := asyncio.Event())
        await allowed.wait()
        work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", delayed)
    adding = [asyncio.create_task(runner.add(name)) for name in ("a", "b")]
    while not all(task.done() for task in adding):
        for _ in range(10):
            await asyncio.sleep(0)
        for allowed in reversed(writes):
            allowed.set()
            for _ in range(10):
                await asyncio.sleep(0)
    assert [model["name"] for model in json.loads(runner.file.read_text("utf-8"))["models"]] == ["a", "b"]


def _served(name: str, added: added_model_pb2.AddedModel | None = None) -> ServedModel:
    return fake_model(name, hibernation=HibernationSettings(start_asleep=True), added=added)


async def test_model_with_a_name_taken_elsewhere_stays_and_is_tried_again(tmp_path: Path) -> None:
    added = added_model_pb2.AddedModel(name="tiny", source=SOURCE)
    async with running_runner(tmp_path, [_served("own"), _served("tiny", added)]) as runner:
        await runner.until(Phase.HIBERNATING, "own")
        runner.registry.taken = {"tiny", "own"}
        runner.service.reopen_session()
        await runner.until_opened(2)
        runner.service.reopen_session()
        await runner.until_opened(3)
        published = [[model.name for model in opened.models] for opened in runner.registry.opened]
        assert published == [["own", "tiny"]] * 3
