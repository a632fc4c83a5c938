"""A model that cannot be loaded when a mesh starts: the others are served, which it once prevented."""

from pathlib import Path

import pytest
from mesh_process import fake_runner, run_weft, running_mesh, write_config

pytestmark = pytest.mark.slow("starts a mesh")


async def test_model_that_fails_at_startup_does_not_block_the_others(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), fake_runner("b", exit_at_start=3, load_seconds=0.1))
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        printed = (tmp_path / "home.out").read_text()
        assert "warn m-b: does not start on b: " in printed
        assert "see " in printed
        for model, status in (("m-a", "active"), ("m-b", "failed")):
            _, shown, error = await run_weft("get", "model", model, "-o", "json", home=mesh.home)
            assert f'"{status}"' in shown, error
        assert (await run_weft("chat", "m-a", "-m", "hi", home=mesh.home))[0] == 0


async def test_start_that_requires_all_models_fails_with_the_first_load_error(tmp_path: Path) -> None:
    runners = fake_runner("a"), fake_runner("b", exit_at_start=3, load_seconds=0.1)
    config = write_config(tmp_path, *runners, require_all_models=True)
    code, out, error = await run_weft("up", "--config", str(config), home=tmp_path / "home")
    assert (code != 0, "m-b does not start on b" in error, "weft is up" in out) == (True, True, False), error
