"""What is found on a machine, as the runners of weft.yaml that serve it."""

import json
from pathlib import Path
from typing import Any

import pytest

from runner_svc.discovery import FoundServer
from runner_svc.model_store.found import ProgramFolders, found_models
from runner_svc.policy.memory_estimate import GIBIBYTE
from runner_svc.runtimes.settings import StartedModelSettings
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors import FieldError
from weft_app.compose.demo import DEMO_RUNNER, demo_model_path
from weft_app.compose.discovery import Discovered, arranged, discover, keep_discovered, loads_discovered, ollama_address
from weft_app.compose.home import WeftHome
from weft_app.config.config import AcceleratorSettings, DeclaredDevice, DiscoverySettings
from weft_app.config.loader import parse_config, parse_section

GGUF, FOLDER = pb.STORED_FORM_GGUF, pb.STORED_FORM_FOLDER
OLLAMA = FoundServer(program="ollama", url="http://127.0.0.1:11434", models=("llama3.2:3b",))
LOCKED = FoundServer(program="server", url="http://127.0.0.1:8000", why_empty="it asks for a key")


def file(source: str, program: str = "huggingface", form: pb.StoredForm.ValueType = GGUF) -> pb.FoundModel:
    return pb.FoundModel(source=source, program=program, form=form)


def test_each_server_becomes_a_runner_that_follows_it() -> None:
    found = arranged([OLLAMA, LOCKED, OLLAMA], [], 16, ())
    assert found.runners() == [{"name": "ollama", "url": OLLAMA.url}, {"name": "ollama-2", "url": OLLAMA.url}]
    config = parse_config({"runners": found.runners()})
    assert all(runner.follows_server for runner in config.runners or ())


def test_model_files_are_loaded_with_their_first_request() -> None:
    found = arranged([], [file("hfcache:acme/smol-GGUF:smol-Q4_K_M.gguf")], 16, ())
    (runner,) = found.runners()
    assert runner["name"] == DEMO_RUNNER
    assert runner["models"] == [
        {"name": "smol-q4_k_m", "source": "hfcache:acme/smol-GGUF:smol-Q4_K_M.gguf", "start_asleep": True}
    ]


def test_files_of_a_program_that_runs_are_its_own_to_serve() -> None:
    files = [file("ollama:llama3.2:3b", "ollama"), file("lmstudio:acme/smol", "lmstudio")]
    found = arranged([OLLAMA], files, 16, ())
    assert ([each.model.source for each in found.files], found.left_out) == (["lmstudio:acme/smol"], 1)


def test_folders_and_more_files_than_may_be_are_left_out_and_counted() -> None:
    files = [file("hfcache:a/folder", form=FOLDER), *(file(f"hfcache:a/m{number}") for number in range(4))]
    found = arranged([], files, 2, ())
    assert ([each.name for each in found.files], found.left_out) == (["m0", "m1"], 3)


def test_no_file_takes_the_name_of_a_servers_model_or_of_one_that_was_added() -> None:
    found = arranged([OLLAMA], [file("hfcache:a/llama3.2:3b"), file("hfcache:a/mine")], 16, ["mine"])
    assert not {each.name for each in found.files} & {"llama3.2:3b", "mine"}


def test_nothing_that_can_be_served_is_nothing() -> None:
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
def test_ollama_is_looked_for_where_its_variable_says(said: str, address: tuple[str, ...]) -> None:
    assert ollama_address({"OLLAMA_HOST": said}) == address


def test_what_was_found_is_read_again_by_the_runners(tmp_path: Path) -> None:
    home = WeftHome(tmp_path)
    keep_discovered(arranged([OLLAMA], [], 16, ()), home)
    config = loads_discovered(home)(tmp_path / "weft.yaml" if (tmp_path / "weft.yaml").exists() else None)
    names = [(runner.name, runner.url, runner.models) for runner in config.runners or ()]
    assert names == [("ollama", OLLAMA.url, ()), (DEMO_RUNNER, None, ())]


@pytest.mark.parametrize("text", [None, "", "{}", '{"runners": 1}', "[]"])
def test_a_list_of_what_was_found_that_cannot_be_read_is_refused(tmp_path: Path, text: str | None) -> None:
    home = WeftHome(tmp_path)
    if text is not None:
        home.state.mkdir()
        (home.state / "discovered.json").write_text(text)
    with pytest.raises(FieldError, match="weft up --discover=yes"):
        loads_discovered(home)


@pytest.mark.parametrize(("written", "mode"), [(True, "yes"), (False, "no"), ("ask", "ask")])
def test_yes_and_no_of_yaml_are_words(written: object, mode: str) -> None:
    assert parse_section(DiscoverySettings, {"mode": written}).mode == mode


def test_an_address_has_a_host_and_a_port() -> None:
    with pytest.raises(FieldError) as refused:
        parse_config({"discovery": {"addresses": ["127.0.0.1:11434", "http://box"]}})
    assert refused.value.field == "discovery.addresses.1"


def test_files_of_llama_cpps_cache_are_found_by_their_path(tmp_path: Path) -> None:
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
    monkeypatch.setattr("weft_app.compose.found_sizes.host_memory_bytes", lambda: 16 * GIBIBYTE)
    return {"HOME": str(tmp_path), "LLAMA_CACHE": str(tmp_path / "cache"), "OLLAMA_MODELS": str(tmp_path / "none")}


async def discovered(home: Path, environment: dict[str, str], **accelerators: Any) -> Discovered:
    settings = DiscoverySettings(addresses=())
    section = AcceleratorSettings(nvidia=False, **accelerators)
    return await discover(settings, WeftHome(home), environment, section)


async def test_found_files_have_the_size_that_a_load_by_their_source_has(
    tmp_path: Path, llama_cache: dict[str, str]
) -> None:
    """They had the context and slots of weft.yaml, whatever the model and the machine were."""
    found = await discovered(tmp_path, llama_cache)
    (file,) = found.files
    # As `weft run`: tests/unit/host/test_model_sizer.py.
    assert file.size == {"context_tokens": 8192, "slots": 2}
    (model,) = (parse_config({"runners": found.runners()}).runners or ())[0].models
    assert isinstance(model, StartedModelSettings)
    assert (model.context_tokens, model.slots) == (8192, 2)


async def test_layers_of_a_found_file_go_where_there_is_room(tmp_path: Path, llama_cache: dict[str, str]) -> None:
    # 512 MiB of each device are the ledger's margin.
    small = await discovered(tmp_path, llama_cache, declared=(DeclaredDevice(name="card", memory_mb=512 + 220),))
    assert small.files[0].size["extra_arguments"][0] == "--gpu-layers"
    assert int(small.files[0].size["extra_arguments"][1]) > 0
    parse_config({"runners": small.runners()})


async def test_a_file_that_no_memory_of_the_machine_holds_is_left_out(
    tmp_path: Path, llama_cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_app.compose.found_sizes.host_memory_bytes", lambda: 1024**2)
    found = await discovered(tmp_path, llama_cache)
    assert (found.files, found.left_out, found.is_something) == ((), 1, False)


async def test_a_file_that_cannot_be_read_is_served_in_one_slot(tmp_path: Path, llama_cache: dict[str, str]) -> None:
    file = tmp_path / "cache" / "acme_smol-Q4_K_M.gguf"
    file.unlink()
    file.write_bytes(b"GGUF and nothing more")
    found = await discovered(tmp_path, llama_cache)
    assert found.files[0].size == {"context_tokens": 4096, "slots": 1}
