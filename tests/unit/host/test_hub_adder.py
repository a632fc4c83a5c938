"""A joined machine adds models of the hub for its mesh, and opens no other source."""

from typing import Any, cast

import pytest
from kit.failures import fails

from runner_svc.added_models import AddRequest
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import parse_source
from weft_app.compose.added_models import HubAdder

OTHERS = (
    "/home/ann/diary.gguf",
    "~/diary.gguf",
    "https://127.0.0.1/x.gguf",
    "ollama:llama3",
    "lmstudio:a/b",
    "hfcache:a/b",
)


class _Noting:
    """An adder that takes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def pull(self, source: Any, *_: Any) -> str:
        self.asked.append(str(source))
        return "pulled"

    async def prepare(self, request: AddRequest, _: Any) -> str:
        self.asked.append(str(request.source))
        return "prepared"

    def load_parameters(self, source: Any) -> list[Any]:
        self.asked.append(str(source))
        return []

    def restored(self, added: added_model_pb2.AddedModel) -> str:
        self.asked.append(added.stored_source)
        return "restored"


async def _ask_all(adder: HubAdder, source: str) -> None:
    parsed = parse_source(source, "source")
    request = AddRequest(source=parsed, name="m", options=load_pb2.LoadOptions())
    await adder.pull(parsed, None, lambda _: None)
    await adder.prepare(request, lambda _: None)
    adder.load_parameters(parsed)
    adder.restored(added_model_pb2.AddedModel(stored_source=source))


async def test_models_of_the_hub_are_added() -> None:
    noting = _Noting()
    await _ask_all(HubAdder(cast("Any", noting)), "hf:acme/tiny-GGUF:Q4_K_M")
    assert noting.asked == ["hf:acme/tiny-GGUF:Q4_K_M"] * 4


@pytest.mark.parametrize("source", OTHERS)
async def test_other_sources_are_refused_before_anything_is_opened(source: str) -> None:
    noting = _Noting()
    adder, parsed = HubAdder(cast("Any", noting)), parse_source(source, "source")
    request = AddRequest(source=parsed, name="m", options=load_pb2.LoadOptions())
    with fails(Reason.PERMISSION_DENIED, "models of the hub"):
        await adder.pull(parsed, None, lambda _: None)
    with fails(Reason.PERMISSION_DENIED):
        await adder.prepare(request, lambda _: None)
    with fails(Reason.PERMISSION_DENIED):
        adder.load_parameters(parsed)
    with fails(Reason.PERMISSION_DENIED):
        adder.restored(added_model_pb2.AddedModel(stored_source=source))
    assert not noting.asked
