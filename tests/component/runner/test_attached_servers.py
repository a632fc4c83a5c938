"""A server is attached to a runner once, however its address is spelled."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.failures import fails

from runner_svc.added_models import AddedModels
from runner_svc.added_models_file import SUFFIX
from runner_svc.followed_servers import FollowedServer, FollowedServers
from runner_svc.instance.settings import ServedModel
from runner_svc.policy.followed_models import FollowedModel
from runner_svc.policy.model_names import ListedModels, ServerList
from runner_svc.policy.model_sizing import MachineMemory
from weft.api.runner.v1 import added_model_pb2, load_pb2, model_store_pb2
from weft.kernel.errors import WeftError
from weft.kernel.model_source import server_place
from weft.kernel.reasons import Reason
from weft_testing.fake_clock import FakeClock


class Host:
    def is_served(self, name: str) -> bool:
        del name
        return False

    async def machine_memory(self) -> MachineMemory:
        raise AssertionError("nothing is sized")

    async def serve(self, model: ServedModel) -> None:
        raise AssertionError(f"{model.name} is listed nowhere")

    async def remove(self, name: str) -> int:
        raise AssertionError(f"{name} is not served")


def followed(name: str, url: str) -> FollowedServer:
    async def list_models(max_age_seconds: float) -> ServerList:
        del max_age_seconds
        return ServerList(models=ListedModels(names=()))

    def serve(model: FollowedModel) -> ServedModel:
        raise AssertionError(f"{model.name} is listed nowhere")

    return FollowedServer(
        name=name, place=server_place(url), list_models=list_models, serve=serve, most=4, interval_seconds=5.0
    )


def server_of(added: added_model_pb2.AddedModel) -> FollowedServer:
    return followed(added.name, added.stored_source)


def hide(_: model_store_pb2.PullProgress) -> None:
    """A ShowPull that shows nothing."""


class Runner:
    def __init__(self, file: Path) -> None:
        self.followed = FollowedServers(Host(), FakeClock())
        self._models = AddedModels(None, Host(), file, self.followed, server_of, 4)

    async def attach(self, url: str, name: str) -> str:
        return (await self._models.add(url, name, load_pb2.LoadOptions(), hide)).name


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    found = Runner(tmp_path / f"local{SUFFIX}")
    yield found
    await found.followed.stop()


OTHER_SPELLINGS = [
    "http://127.0.0.1:11434/",
    "http://localhost:11434/v1",
    "http://LOCALHOST:11434",
    "http://[::1]:11434",
]


@pytest.mark.parametrize("url", OTHER_SPELLINGS)
async def test_server_under_another_address_spelling_counts_as_attached(runner: Runner, url: str) -> None:
    """It was attached twice, and each of its models served twice."""
    assert await runner.attach("http://localhost:11434", "ollama") == "ollama"
    with fails(Reason.ALREADY_EXISTS) as refused:
        await runner.attach(url, "ollama-2")
    assert refused.value.message == "the server is already attached, as ollama"
    assert await runner.attach(url, "ollama") == "ollama", "under its name that is no error"
    assert runner.followed.names == ("ollama",)


@pytest.mark.parametrize("url", OTHER_SPELLINGS)
async def test_configured_server_is_not_attached_twice(runner: Runner, url: str) -> None:
    await runner.followed.follow(followed("box", "http://localhost:11434"))
    with pytest.raises(WeftError) as refused:
        await runner.attach(url, "ollama")
    assert refused.value.message == "the configuration already has this server, as box"


async def test_another_port_or_path_of_the_same_machine_is_a_different_server(runner: Runner) -> None:
    for name, url in {
        "a": "http://localhost:1234",
        "b": "http://localhost:1235",
        "c": "http://localhost:1234/x/v1",
    }.items():
        assert await runner.attach(url, name) == name
