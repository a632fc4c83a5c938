"""A mesh whose server is another mesh: what its start says of it, and whose tokens are counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from mesh_process import POOL, MeshProcess, fake_runner, run_weft, running_mesh, write_config

SECONDS = 60.0


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("upstream")
    config = write_config(folder, fake_runner("a", slots=1, answer_tokens=5))
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, upstream: MeshProcess) -> Path:
    """Of a mesh that names no model of its upstream, and one of them in another section."""
    named = {"name": "named", "url": upstream.url, "models": [{"name": POOL}]}
    return write_config(tmp_path_factory.mktemp("mesh"), {"name": "box", "url": upstream.url}, named)


@pytest.fixture(scope="module")
def mesh(config: Path) -> Iterator[MeshProcess]:
    with running_mesh(config.parent / "home", "--config", str(config)) as mesh:
        yield mesh


def chat(mesh: MeshProcess, model: str, text: str, *, stream: bool = False) -> dict[str, Any]:
    """The usage that a chat is answered with."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"}
    request = Request(f"{mesh.url}/v1/chat/completions", data=json.dumps(body).encode(), headers=headers)
    with urlopen(request, timeout=SECONDS) as answer:
        text = answer.read().decode()
    if not stream:
        return dict(json.loads(text)["usage"])
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return dict(usage)


def counted(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, cached and answered tokens."""
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


async def test_start_and_doctor_recognize_a_server_that_is_a_mesh(
    tmp_path: Path, config: Path, mesh: MeshProcess
) -> None:
    """The start said that it does not answer, or lists no models; the doctor that it is to be started."""
    banner = (mesh.home.parent / "home.out").read_text()
    assert "warn box: serves no model of its server: it is a weft mesh; list its models one by one" in banner
    assert "list them beside its url, such as models: [{name: qwen}]" in banner
    _, shown, _ = await run_weft("doctor", "--config", str(config), home=tmp_path / "other")
    assert "list them beside its url" in shown
    assert "start it, or correct url" not in shown


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_of_a_remote_mesh_model_matches_that_mesh(
    mesh: MeshProcess, upstream: MeshProcess, *, stream: bool
) -> None:
    text = "count the words of this rather long prompt, " * 20 + str(stream)
    first, again = (counted(chat(mesh, POOL, text, stream=stream)) for _ in range(2))
    directly = counted(chat(upstream, POOL, text, stream=stream))
    assert first[1] < again[1], "the second one finds its prompt in the cache of the other mesh's engine"
    assert again == directly
    assert (first[0], first[2]) == (directly[0], directly[2])
    assert directly[2] == 5
