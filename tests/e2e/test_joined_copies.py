"""A joined machine copies the files of a model from the mesh, while the hub cannot be reached."""

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
