"""`weft run` on an empty home: from the name of a model at a hub to a real answer, in one command."""

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_process import WEFT, eventually, run_weft

from weft_app.compose.demo import demo_model_path
from weft_app.compose.home import WeftHome
from weft_testing.model_hub import HubRepository, ModelHub

SOURCE = "hf:acme/smol-GGUF:Q4_1"
QUESTION = "What is the capital of France? Answer with one word."
RUN_SECONDS = 120.0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    hub.repositories["acme/smol-GGUF"] = HubRepository(files={"smol-Q4_1.gguf": demo_model_path().read_bytes()})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    with hub.running():
        yield hub


@pytest.mark.real
async def test_interrupted_pull_resumes_and_the_run_command_answers(hub: ModelHub, tmp_path: Path) -> None:
    home, size = tmp_path / "home", len(hub.repositories["acme/smol-GGUF"].files["smol-Q4_1.gguf"])
    hub.faults.chunk_seconds = 0.005
    first = await asyncio.create_subprocess_exec(
        *WEFT,
        *("run", SOURCE, "Say hello", "--home", str(home)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await eventually(lambda: hub.sent_bytes > size // 10, RUN_SECONDS, "nothing is pulled")
    first.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(first.communicate(), RUN_SECONDS)
    assert (first.returncode, out) == (130, b"")
    assert b"stopped; the pulled parts are kept; run the same command to continue" in err
    assert not WeftHome(home).is_claimed(), "the mesh has ended with the command"

    hub.faults.chunk_seconds, before = 0.0, hub.sent_bytes
    code, answer, said = await run_weft("run", SOURCE, QUESTION, "--temperature", "0", "--max-tokens", "16", home=home)
    assert code == 0, said
    assert "Paris" in answer
    assert hub.sent_bytes - before < size, "what was pulled is not pulled again"
    assert f"weft: {SOURCE} is served as smol-q4_1\n" in said
    assert "weft:   context 8192: the full training context; 360 MiB of KV cache\n" in said
    assert "weft:   2 slots: the default number on processors\n" in said
    assert re.search(r"weft:   in the host's memory, without an accelerator: about [\d.]+ [MG]iB in .* GiB of", said)
    assert f"`weft up --home {home}" in said
    assert not WeftHome(home).is_claimed()
