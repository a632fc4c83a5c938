"""A joined machine copies the files of a model from the mesh: what the hub lists, or any while it cannot be reached."""

import json
from functools import partial
from pathlib import Path

import pytest
from chats import answers
from join_process import make_token, relay_facts, running_join
from mesh_process import eventually, run_weft, running_mesh, write_config

from weft_app.compose.demo import demo_model_path
from weft_testing.model_hub import HubRepository, ModelHub

pytestmark = pytest.mark.slow("starts a mesh, a joined runner and an engine")

SOURCE = "hf:acme/smol-GGUF"
NOWHERE = "http://127.0.0.1:9"
SIZES = {"context_tokens": 512, "slots": 1, "start_asleep": True}


@pytest.mark.real
async def test_joined_machine_copies_a_model_from_the_runner_of_the_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ModelHub()
    hub.repositories["acme/smol-GGUF"] = HubRepository(files={"smol-Q4_1.gguf": demo_model_path().read_bytes()})
    monkeypatch.setenv("HF_TOKEN", "")
    own = {"name": "own", "path": str(demo_model_path()), **SIZES}
    (tmp_path / "mesh").mkdir()
    (tmp_path / "laptop").mkdir()
    config = write_config(tmp_path / "mesh", {"name": "desk", "models": [own]}, relay={"listen": "127.0.0.1:0"})
    with running_mesh(tmp_path / "mesh" / "home", "--config", str(config)) as mesh:
        with hub.running():
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            code, _, said = await run_weft("pull", SOURCE, "--config", str(config), home=mesh.home)
            assert code == 0, said
        monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
        model = {"name": "copied", "source": SOURCE, "publish": True, **SIZES}
        laptop = write_config(tmp_path / "laptop", {"name": "laptop", "models": [model]})
        home, token = tmp_path / "laptop" / "home", (await make_token(mesh.home))["token"]
        with running_join(home, relay_facts(mesh.home)["url"], token, "--config", str(laptop)) as join:
            await join.until("joined")
            await eventually(partial(answers, mesh.url, "copied"), 60.0, "the copied model does not answer")
        assert [file.read_bytes() for file in (home / "models" / "blobs").iterdir()] == [demo_model_path().read_bytes()]
        (manifest,) = (home / "models" / "manifests").iterdir()
        assert json.loads(manifest.read_text())["copiedFrom"] == "desk"


@pytest.mark.real
async def test_joined_machine_copies_what_the_hub_lists_and_refuses_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, hub = demo_model_path().read_bytes(), ModelHub()
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    own = {"name": "own", "path": str(demo_model_path()), **SIZES}
    (tmp_path / "mesh").mkdir()
    (tmp_path / "laptop").mkdir()
    config = write_config(tmp_path / "mesh", {"name": "desk", "models": [own]}, relay={"listen": "127.0.0.1:0"})
    with running_mesh(tmp_path / "mesh" / "home", "--config", str(config)) as mesh, hub.running():
        for name, stored in {"same": content, "changed": content + b"x"}.items():
            hub.repositories[f"acme/{name}-GGUF"] = HubRepository(files={f"{name}-Q4_1.gguf": stored})
            code, _, said = await run_weft("pull", f"hf:acme/{name}-GGUF", "--config", str(config), home=mesh.home)
            assert code == 0, said
        hub.repositories["acme/changed-GGUF"].files["changed-Q4_1.gguf"] = content[:-1] + b"y"
        hub.requests.clear()
        names = ("same", "changed")
        models = [{"name": each, "source": f"hf:acme/{each}-GGUF", "publish": True, **SIZES} for each in names]
        laptop = write_config(tmp_path / "laptop", {"name": "laptop", "models": models})
        home, token = tmp_path / "laptop" / "home", (await make_token(mesh.home))["token"]
        with running_join(home, relay_facts(mesh.home)["url"], token, "--config", str(laptop)) as join:
            await join.until("joined")
            for each in names:
                await eventually(partial(answers, mesh.url, each), 60.0, f"{each} does not answer")
    copied = {file.read_bytes() for file in (home / "models" / "blobs").iterdir()}
    assert copied == {content, content[:-1] + b"y"}
    assert [request.path for request in hub.requested("GET", "/cdn/")] == ["/cdn/1/acme/changed-GGUF/changed-Q4_1.gguf"]
