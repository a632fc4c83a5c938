"""What a running mesh finds on its machine, and what of it is served already."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from runner_svc.discovery import FoundServer
from weft.api.runner.v1 import added_model_pb2, model_store_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.discover import _page
from weft_app.compose import discovered_here
from weft_app.compose.discovered_here import (
    FRESH_SECONDS,
    MAX_LISTED_MODELS,
    DiscoveredHere,
    discovery_of,
    served_sources,
)
from weft_app.compose.discovery import Discovered, FoundFile
from weft_app.compose.home import WeftHome
from weft_app.config.config import DiscoverySettings
from weft_app.config.loader import parse_config
from weft_testing.fake_clock import FakeClock

OLLAMA = FoundServer(program="ollama", url="http://127.0.0.1:11434", version="0.9", models=("llama3.2:3b",))
LOCKED = FoundServer(program="server", url="http://127.0.0.1:8000", why_empty="it requires an API key")
FILE = FoundFile(name="smol", model=model_store_pb2.FoundModel(source="hfcache:acme/smol", path="/cache/smol.gguf"))


def found_here(served: frozenset[str]) -> tuple[list[bool], list[bool]]:
    listed = discovery_of(Discovered(servers=(OLLAMA, LOCKED), files=(FILE,), left_out=3), served)
    assert [each.source for each in listed.servers] == [OLLAMA.url, LOCKED.url]
    assert (listed.servers[0].title, listed.servers[1].detail) == ("Ollama 0.9", "it requires an API key")
    assert (listed.files[0].source, listed.files_left_out) == ("hfcache:acme/smol", 3)
    return [each.served for each in listed.servers], [each.served for each in listed.files]


def test_files_that_cannot_be_served_are_not_reported_as_missing() -> None:
    """The page listed three model files as not served, and then that no program has model files."""
    count, nothing, _ = _page(Discovered(left_out=3), DiscoverySettings(addresses=("127.0.0.1:1",)))
    assert count == "\n3 more model files are not served; weft models ls --found lists them"
    assert nothing == (
        "nothing found: no engine answers at 127.0.0.1:1, and no program has model files that can be served"
    )


def test_files_that_are_not_looked_for_are_not_reported_as_missing() -> None:
    nothing, _ = _page(Discovered(), DiscoverySettings(addresses=("127.0.0.1:1",), max_files=0))
    assert nothing.endswith("and model files were not looked for (discovery.max_files is 0)")


def test_source_without_a_runner_is_not_served() -> None:
    assert found_here(frozenset()) == ([False, False], [False])


def test_server_followed_by_a_configured_runner_is_served_for_any_spelling() -> None:
    config = parse_config({"runners": [{"name": "ollama", "url": "http://localhost:11434/v1"}]})
    assert found_here(served_sources(config, [])) == ([True, False], [False])


@pytest.mark.parametrize("settings", [{"source": "hfcache:acme/smol"}, {"path": "/cache/smol.gguf"}])
def test_file_of_a_configured_model_is_served(settings: dict[str, Any]) -> None:
    config = parse_config({"runners": [{"name": "local", "models": [{"name": "smol", **settings}]}]})
    assert found_here(served_sources(config, [])) == ([False, False], [True])


def test_source_added_at_runtime_is_served() -> None:
    server = added_model_pb2.AddedModel(name="box", source="http://127.0.0.1:8000/v1")
    server.server.SetInParent()
    added = [server, added_model_pb2.AddedModel(name="smol", source="hfcache:acme/smol")]
    assert found_here(served_sources(parse_config({}), added)) == ([False, True], [True])


def test_server_list_is_truncated() -> None:
    server = FoundServer(program="vllm", url="http://127.0.0.1:8000", models=tuple(f"m{n}" for n in range(1000)))
    assert len(discovery_of(Discovered(servers=(server,)), frozenset()).servers[0].models) == MAX_LISTED_MODELS


async def test_concurrent_discovery_requests_share_one_scan_until_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    may_end = asyncio.Event()

    async def look(_settings: Any, home: WeftHome) -> Discovered:
        looks.append(home.root)
        await may_end.wait()
        return Discovered(servers=(OLLAMA,))

    monkeypatch.setattr(discovered_here, "discover", look)
    clock, config = FakeClock(), parse_config({})
    here = DiscoveredHere(lambda: config, WeftHome(tmp_path), clock)
    asked = [asyncio.create_task(here()) for _ in range(3)]
    may_end.set()
    found = await asyncio.gather(*asked)
    assert ([len(each.servers) for each in found], len(looks)) == ([1, 1, 1], 1)
    await clock.advance(FRESH_SECONDS + 1)
    await here()
    assert len(looks) == 2


async def test_discovery_is_refused_if_disabled_by_configuration(tmp_path: Path) -> None:
    config = parse_config({"discovery": {"mode": "no"}})
    with pytest.raises(WeftError, match=r"discovery\.mode") as refused:
        await DiscoveredHere(lambda: config, WeftHome(tmp_path), FakeClock())()
    assert refused.value.reason is Reason.UNSUPPORTED_OPERATION
