"""What is found on a machine, as the runners of weft.yaml that serve it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runner_svc.discovery import FoundServer
from runner_svc.model_store.found import ProgramFolders, found_models
from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.runtimes.runtime_settings import StartedModelSettings
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.demo import DEMO_RUNNER, demo_model_path
from weft_app.compose.discovery import (
    Discovered,
    arranged,
    discover,
    discovered_runners,
    keep_discovered,
    ollama_address,
)
from weft_app.compose.home import WeftHome
from weft_app.config.config import USUAL_ADDRESSES, AcceleratorSettings, DeclaredDevice, DiscoverySettings
from weft_app.config.loader import parse_config, parse_section

GGUF, FOLDER = pb.STORED_FORM_GGUF, pb.STORED_FORM_FOLDER
OLLAMA = FoundServer(program="ollama", url="http://127.0.0.1:11434", models=("llama3.2:3b",))
LOCKED = FoundServer(program="server", url="http://127.0.0.1:8000", why_empty="it requires an API key")


def file(source: str, program: str = "huggingface", form: pb.StoredForm.ValueType = GGUF) -> pb.FoundModel:
    return pb.FoundModel(source=source, program=program, form=form)


def test_each_server_becomes_a_runner_that_follows_it() -> None:
    found = arranged([OLLAMA, LOCKED, OLLAMA], [], 16, ())
    assert found.runners() == [{"name": "ollama", "url": OLLAMA.url}, {"name": "ollama-2", "url": OLLAMA.url}]
    config = parse_config({"runners": found.runners()})
    assert all(runner.follows_server for runner in config.runners or ())


def test_model_files_are_loaded_on_their_first_request() -> None:
    found = arranged([], [file("hfcache:acme/smol-GGUF:smol-Q4_K_M.gguf")], 16, ())
    (runner,) = found.runners()
    assert runner["name"] == DEMO_RUNNER
    assert runner["models"] == [
        {"name": "smol-q4_k_m", "source": "hfcache:acme/smol-GGUF:smol-Q4_K_M.gguf", "start_asleep": True}
    ]


def test_files_of_a_running_program_are_not_served_separately() -> None:
    files = [file("ollama:llama3.2:3b", "ollama"), file("lmstudio:acme/smol", "lmstudio")]
    found = arranged([OLLAMA], files, 16, ())
    assert ([each.model.source for each in found.files], found.left_out) == (["lmstudio:acme/smol"], 1)


def test_folders_and_excess_files_are_skipped_and_counted() -> None:
    files = [file("hfcache:a/folder", form=FOLDER), *(file(f"hfcache:a/m{number}") for number in range(4))]
    found = arranged([], files, 2, ())
    assert ([each.name for each in found.files], found.left_out) == (["m0", "m1"], 3)


def test_file_does_not_take_the_name_of_a_server_model_or_added_model() -> None:
    found = arranged([OLLAMA], [file("hfcache:a/llama3.2:3b"), file("hfcache:a/mine")], 16, ["mine"])
    assert not {each.name for each in found.files} & {"llama3.2:3b", "mine"}


def test_discovery_without_servable_sources_is_empty() -> None:
    assert not arranged([LOCKED], [file("hfcache:a/folder", form=FOLDER)], 16, ()).is_something


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("", ()),
        ("0.0.0.0", ()),
        ("0.0.0.0:11500", ("127.0.0.1:11500",)),
        (":11500", ("127.0.0.1:11500",)),
        ("http://box.lan:11434/", ("box.lan:11434",)),
        ("127.0.0.1:99999", ()),
        ("127.0.0.1:x", ()),
    ],
)
def test_ollama_is_searched_at_its_variables_address(said: str, address: tuple[str, ...]) -> None:
    assert ollama_address({"OLLAMA_HOST": said}) == address


@pytest.mark.parametrize("addresses", [("127.0.0.1:8000",), ()])
async def test_given_addresses_replace_that_of_ollamas_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    """A server that was not among the addresses was found, and could be served."""
    probed: list[tuple[str, ...]] = []

    async def find_servers(found: tuple[str, ...], _: float) -> list[FoundServer]:
        probed.append(found)
        return []

    monkeypatch.setattr("runner_svc.discovery.find_servers", find_servers)
    environment = {"OLLAMA_HOST": "box.lan:11434"}
    await discover(DiscoverySettings(addresses=addresses, max_files=0), WeftHome(tmp_path), environment)
    await discover(DiscoverySettings(max_files=0), WeftHome(tmp_path), environment)
    assert probed == [addresses, (*USUAL_ADDRESSES, "box.lan:11434")]


def test_runners_load_the_saved_discovery(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    keep_discovered(arranged([OLLAMA], [], 16, ()), home)
    config = ConfigurationSource(runners=partial(discovered_runners, home)).load().config
    names = [(runner.name, runner.url, runner.models) for runner in config.runners or ()]
    assert names == [("ollama", OLLAMA.url, ()), (DEMO_RUNNER, None, ())]


@pytest.mark.parametrize("text", [None, "", "{}", '{"runners": 1}', "[]"])
def test_unreadable_discovery_file_is_refused(tmp_path: Path, text: str | None) -> None:
    home = WeftHome(tmp_path)
    if text is not None:
        home.state.mkdir()
        (home.state / "discovered.json").write_text(text)
    with pytest.raises(FieldError, match="weft up --discover=yes"):
        discovered_runners(home)


@pytest.mark.parametrize(("written", "mode"), [(True, "yes"), (False, "no"), ("ask", "ask")])
def test_yaml_booleans_are_accepted_as_words(written: object, mode: str) -> None:
    assert parse_section(DiscoverySettings, {"mode": written}).mode == mode


def test_address_has_a_host_and_a_port() -> None:
    with pytest.raises(FieldError) as refused:
        parse_config({"discovery": {"addresses": ["127.0.0.1:11434", "http://box"]}})
    assert refused.value.field == "discovery.addresses.1"


def test_llama_cpp_cache_files_are_found_by_their_path(tmp_path: Path) -> None:
    folders = ProgramFolders(hub_cache=tmp_path / "none", ollama=(), lm_studio=(), llama_cpp=(tmp_path,))
    for name in ("acme_smol-Q4_K_M.gguf", "acme_smol-Q8_0.gguf", "manifest.json"):
        (tmp_path / name).write_text(json.dumps({}))
    found = found_models(folders)
    assert [(each.program, each.source, each.quantization) for each in found] == [
        ("llama.cpp", str(tmp_path / "acme_smol-Q4_K_M.gguf"), "Q4_K_M"),
        ("llama.cpp", str(tmp_path / "acme_smol-Q8_0.gguf"), "Q8_0"),
    ]


@pytest.fixture
def llama_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of an account with one model file, in llama.cpp's cache, on a machine of 16 GiB."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "acme_smol-Q4_K_M.gguf").symlink_to(demo_model_path())
    monkeypatch.setattr("weft_app.compose.model_sizes.host_memory_bytes", lambda: 16 * GIBIBYTE)
    return {"HOME": str(tmp_path), "LLAMA_CACHE": str(tmp_path / "cache"), "OLLAMA_MODELS": str(tmp_path / "none")}


async def discovered(home: Path, environment: dict[str, str], **accelerators: Any) -> Discovered:
    settings = DiscoverySettings(addresses=())
    section = AcceleratorSettings(nvidia=False, **accelerators)
    return await discover(settings, WeftHome(home), environment, section)


async def test_discovered_files_have_the_size_of_a_load_from_their_source(
    tmp_path: Path, llama_cache: dict[str, str]
) -> None:
    """They had the context and slots of weft.yaml, whatever the model and the machine were."""
    found = await discovered(tmp_path, llama_cache)
    (file,) = found.files
    # As `weft run`: tests/unit/host/test_model_sizes.py.
    assert file.size == {"context_tokens": 8192, "slots": 2}
    (model,) = (parse_config({"runners": found.runners()}).runners or ())[0].models
    assert isinstance(model, StartedModelSettings)
    assert (model.context_tokens, model.slots) == (8192, 2)


async def test_layers_of_a_discovered_file_are_placed_where_they_fit(
    tmp_path: Path, llama_cache: dict[str, str]
) -> None:
    # 512 MiB of each device are the ledger's margin.
    small = await discovered(tmp_path, llama_cache, declared=(DeclaredDevice(name="card", memory_mb=512 + 220),))
    assert small.files[0].size["extra_arguments"][0] == "--gpu-layers"
    assert int(small.files[0].size["extra_arguments"][1]) > 0
    parse_config({"runners": small.runners()})


async def test_file_too_large_for_the_machine_is_skipped(
    tmp_path: Path, llama_cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_app.compose.model_sizes.host_memory_bytes", lambda: 1024**2)
    found = await discovered(tmp_path, llama_cache)
    assert (found.files, found.left_out, found.is_something) == ((), 1, False)


async def test_unreadable_file_is_served_with_one_slot(tmp_path: Path, llama_cache: dict[str, str]) -> None:
    file = tmp_path / "cache" / "acme_smol-Q4_K_M.gguf"
    file.unlink()
    file.write_bytes(b"GGUF and nothing more")
    found = await discovered(tmp_path, llama_cache)
    assert found.files[0].size == {"context_tokens": 4096, "slots": 1}
