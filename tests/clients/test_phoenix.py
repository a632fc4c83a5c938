"""Arize Phoenix shows the request of a mesh as a call of a model, with our token counts."""

import asyncio
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from client_environments import EnvironmentFactory
from mesh_process import fake_runner, running_mesh, write_config

from weft_testing.free_port import free_ports

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

START_SECONDS = 150.0
"""It migrates its database first."""
DEADLINE_SECONDS = 30.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5
MODEL = "m-a"
TOKENS = 5


@contextmanager
def _running_phoenix(folder: Path) -> Iterator[str]:
    """Phoenix with a database of its own; yields its address."""
    environments = EnvironmentFactory()
    try:
        installed = environments.get("phoenix")
    finally:
        environments.close()
    port = free_ports(2)
    variables = {
        "PHOENIX_WORKING_DIR": str(folder / "phoenix"),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(port + 1),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    (folder / "phoenix").mkdir()
    url = f"http://127.0.0.1:{port}"
    with (folder / "phoenix.out").open("wb") as output:
        process = subprocess.Popen(
            [str(installed.folder / "bin" / "phoenix"), "serve"],
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while _asked(f"{url}/v1/projects") is None:
            assert process.poll() is None, (folder / "phoenix.out").read_text()
            assert time.monotonic() < deadline, "Phoenix is not ready"
            time.sleep(POLL_SECONDS)
        yield url
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _asked(url: str) -> Any:
    """Returns the document at an address; None: there is none."""
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            return json.load(answer)
    except OSError:
        return None


def _spans(url: str) -> dict[str, dict[str, Any]]:
    """Returns the spans that it shows, by name."""
    page = _asked(f"{url}/v1/projects/default/spans?limit=100")
    return {} if page is None else {span["name"]: span for span in page["data"]}


def test_phoenix_shows_a_request_as_a_model_call_with_weft_token_counts(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a", answer_tokens=TOKENS))
    with _running_phoenix(tmp_path) as url, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        environment.setenv("OTEL_TRACES_SAMPLER_ARG", "1")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            usage = asyncio.run(_chat(mesh.url))["usage"]
        deadline = time.monotonic() + DEADLINE_SECONDS
        # It shows each batch of spans by itself, and the host and the runner send their own.
        expected = {"POST /v1/chat/completions", f"chat {MODEL}", "weft.attempt", "weft.generate"}
        while not expected <= set(found := _spans(url)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    assert expected <= set(found)
    call = found[f"chat {MODEL}"]
    assert (call["span_kind"], call["attributes"]["llm.model_name"]) == ("LLM", MODEL)
    assert call["attributes"]["llm.token_count.prompt"] == usage["prompt_tokens"]
    assert call["attributes"]["llm.token_count.completion"] == usage["completion_tokens"] == TOKENS
    others = [span for name, span in found.items() if name != call["name"]]
    assert not [span for span in others if "llm.token_count.prompt" in span["attributes"]], "counted twice"


async def _chat(url: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    return found
