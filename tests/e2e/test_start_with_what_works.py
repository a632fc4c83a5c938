"""A model that cannot be loaded when a mesh starts: the others are served, which it once prevented."""

from functools import partial
from pathlib import Path

import pytest
from kit.listing_server import listing_server
from kit.tiny_gguf import write_gguf
from mesh_process import eventually, fake_runner, run_weft, running_mesh, write_config

from weft_testing.free_port import free_port

pytestmark = pytest.mark.slow("starts a mesh")
LATER_SECONDS = 60.0


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


async def test_truncated_file_and_offline_server_do_not_block_a_good_model_and_are_served_later(tmp_path: Path) -> None:
    """`weft up` exited with 1 and served nothing."""
    file, port = write_gguf(tmp_path / "m.gguf"), free_port()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    truncated = {**fake_runner("file"), "models": [{"name": "m-file", "path": str(file)}]}
    server = {"name": "m-server", "url": f"http://127.0.0.1:{port}/v1"}
    offline = {"name": "server", "runtime": "openai_http", "probe_interval_seconds": 0.2, "models": [server]}
    config = write_config(tmp_path, fake_runner("a"), truncated, offline)
    reasons = {"m-file": "it is truncated", "m-server": "the server does not answer"}
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:

        async def answers(model: str) -> bool:
            return (await run_weft("chat", model, "-m", "hi", home=mesh.home))[0] == 0

        assert await answers("m-a")
        printed = (tmp_path / "home.out").read_text().splitlines()
        for model, reason in reasons.items():
            (warned,) = [line for line in printed if line.startswith(f"warn {model}: does not start on ")]
            assert reason in warned
            _, shown, error = await run_weft("describe", "model", model, home=mesh.home)
            (status,) = [line.split()[1] for line in shown.splitlines() if line.startswith("Status:")]
            assert (status, reason in shown) == ("failed", True), error
        file.write_bytes(whole)
        with listing_server("m-server", is_ollama=False, port=port):
            for model in reasons:
                await eventually(partial(answers, model), LATER_SECONDS, f"{model} is not served later")


async def test_start_that_requires_all_models_fails_with_the_first_load_error(tmp_path: Path) -> None:
    runners = fake_runner("a"), fake_runner("b", exit_at_start=3, load_seconds=0.1)
    config = write_config(tmp_path, *runners, require_all_models=True)
    code, out, error = await run_weft("up", "--config", str(config), home=tmp_path / "home")
    assert (code != 0, "m-b does not start on b" in error, "weft is up" in out) == (True, True, False), error
