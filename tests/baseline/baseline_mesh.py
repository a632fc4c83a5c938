"""The meshes that the baseline is recorded on: fake engines that always answer the same, with and without keys."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kit.warm_python import warm
from mesh_process import WEFT, MeshProcess, running_mesh, user_environment, write_config
from normal_form import NormalForm

from weft_testing.fake_backend.process import fake_backend_command

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 60.0
TURNS = [
    {"calls": [{"name": "desk_echo", "arguments": '{"text": "found it"}'}]},
    {"text": "It is there. ", "calls": [{"name": "LOW_CONFIDENCE", "arguments": '{"reason": "old notes"}'}]},
]
CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"answer_tokens": 4},
    "echo": {"echo": True},
    "think": {"answer_tokens": 2, "reasoning_text": "Let me see"},
    "call": {"tool_call": CALL},
    "slow": {"answer_tokens": 2, "prefill_seconds": 2.5, "prefill_idle": True},
    # It gets no token before it is cancelled: how many it would have follows from the load of the machine.
    "long": {"answer_tokens": 0, "prefill_seconds": 1_000.0, "prefill_idle": True},
    "lines": {"text": "one\ntwo\nthree four"},
}
"""Models of the runner `main`, each with its own engine: switches of the fake backend."""
FLAGS: Mapping[str, tuple[str, ...]] = {
    "embed": ("--embeddings",),
    "rank": ("--reranking",),
    "words": ("--text-only", "--answer-tokens", "3"),
}
BROKEN: Mapping[str, Mapping[str, Any]] = {
    "cut": {"close_after_tokens": 2, "answer_tokens": 4},
    "page": {"html_200": True},
    "refuses": {"status": 400, "slow_headers_seconds": 1.5},
    "busy": {"status": 503},
}
"""Models that fail, each on its own runner, since failures pause a runner."""
ALIASES = [{"name": "gpt-4o", "target": "m-plain"}, {"name": "claude", "pattern": "claude-*", "target": "m-think"}]
MEDIA = ("chat", "rerank", "tokenize", "image", "transcription", "speech")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineMesh:
    """A running mesh, and what its outputs have of this machine and this run."""

    mesh: MeshProcess
    places: Mapping[str, str]

    def run(self, line: str) -> str:
        """Returns what a `weft` command printed, with its exit code, in normal form."""
        done = self.command(line)
        form = NormalForm(self.places)
        shown = [f"(exit code {done.returncode})", _printed(form, line, done.stdout)]
        errors = form.table(done.stderr)
        return "\n".join(part for part in (*shown, f"--- stderr\n{errors}" if errors else "") if part)

    def command(self, line: str) -> subprocess.CompletedProcess[str]:
        """Runs a `weft` command on the home of the mesh, from the folder with the documents of the baseline."""
        return subprocess.run(
            [*WEFT, *shlex.split(line)],
            env={**user_environment(), "WEFT_HOME": str(self.mesh.home), "COLUMNS": "100", "NO_COLOR": "1"},
            cwd=Path(__file__).parent / "documents",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )


def _printed(form: NormalForm, line: str, text: str) -> str:
    if re.search(r"-o json\b|config schema", line):
        return form.json(text) if text.count("\n{") == 0 else form.stream(text)
    return form.yaml(text) if "-o yaml" in line else form.table(text)


@contextmanager
def running_baseline(folder: Path) -> Iterator[BaselineMesh]:
    """The mesh without keys, with all models."""
    with ExitStack() as stack:
        address = stack.enter_context(_media_server())
        runners = [_main_runner(folder), *(_engine(folder, name, switches) for name, switches in BROKEN.items())]
        runners += [_tool_runner(folder), _attached(address)]
        config = write_config(
            folder,
            *runners,
            registry={"aliases": ALIASES},
            router={"rate_limits": {"tenants": {"limited": ["2req/min"]}}},
            gateway={"max_body_bytes": 100_000, "ollama_sources": {"tiny:1b": "hf:weft/tiny-GGUF:Q8_0"}},
            discovery={"mode": "no"},
        )
        yield stack.enter_context(_started(folder, config, {address: "<media>"}))


@contextmanager
def running_keyed(folder: Path) -> Iterator[BaselineMesh]:
    """A mesh that requires keys, with one model."""
    config = write_config(folder, _engine(folder, "plain", ENGINES["plain"]), auth={"required": True})
    with _started(folder, config, {}) as running:
        yield running


@contextmanager
def _started(folder: Path, config: Path, places: Mapping[str, str]) -> Iterator[BaselineMesh]:
    home = folder / "home"
    with running_mesh(home, "--config", str(config), "--grpc-port", "0") as mesh:
        known = {
            **places,
            str(home): "<home>",
            str(folder): "<folder>",
            str(ROOT): "<repository>",
            sys.executable: "<python>",
            platform.python_version(): "<version>",
            **{version(name): "<version>" for name in ("weft", "grpcio", "protobuf")},
            platform.node(): "<host>",
            f"python -m {WEFT[-1]}": "weft",
        }
        yield BaselineMesh(mesh=mesh, places=known)


def _model_file(folder: Path) -> str:
    """Returns a file for models, of a size that is always the same."""
    path = folder / "model.gguf"
    path.write_bytes(b"x" * 4096)
    return str(path)


def _runner(name: str, *models: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": name, "models": list(models), "first_term_seconds": 0.5, **fields}


def _model(folder: Path, name: str, *flags: str, **fields: Any) -> dict[str, Any]:
    path = _model_file(folder)
    return {"name": f"m-{name}", "path": path, "slots": 4, "extra_arguments": list(flags), **fields}


def _flags(switches: Mapping[str, Any]) -> list[str]:
    return fake_backend_command(**switches)[5:]


def _main_runner(folder: Path) -> dict[str, Any]:
    models = [_model(folder, name, *_flags(switches)) for name, switches in ENGINES.items()]
    models += [_model(folder, name, *flags) for name, flags in FLAGS.items()]
    for model in models:
        if model["name"] in {"m-lines", "m-rank"}:
            model["pool"] = "duo"
    agents = [
        {"name": "reviewer", "model": "m-echo", "system_prompt": "Be terse.", "default_params": {"temperature": 0.2}}
    ]
    return _runner("main", *models, command=fake_backend_command(), agents=agents)


def _engine(folder: Path, name: str, switches: Mapping[str, Any]) -> dict[str, Any]:
    return _runner(name, _model(folder, name), command=fake_backend_command(**switches))


def _tool_runner(folder: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "weft_testing.fake_mcp_server", "--bare"]
    agent = {"name": "clerk", "model": "m-desk", "tools": ["desk.echo"], "signals": ["LOW_CONFIDENCE"]}
    return _runner(
        "desk",
        _model(folder, "desk"),
        command=fake_backend_command(turns=TURNS),
        tools=[{"type": "mcp_command", "name": "desk", "argv": argv}],
        agents=[agent],
    )


def _attached(address: str) -> dict[str, Any]:
    media = {"name": "m-media", "url": f"{address}/v1", "operations": list(MEDIA), "context_tokens": 4096}
    far = {"name": "m-far", "url": f"{address}/v1", "remote": True, "operations": ["chat"]}
    return _runner("attached", media, far, runtime="openai_http")


@contextmanager
def _media_server() -> Iterator[str]:
    """Starts a fake engine that is attached by its address; returns the address."""
    flags = ("--die-with-parent", "--reranking", "--offers", "image,transcription,speech", "--answer-tokens", "3")
    command = [*warm("weft_testing.fake_backend"), *fake_backend_command(*flags)[3:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(found[1] for line in process.stdout if (found := re.search(r"listening on (http://\S+)", line)))
        finally:
            process.kill()


def key_of(mesh: BaselineMesh, *options: str) -> str:
    """Returns a new key of a mesh, as `weft keys create` prints it."""
    return mesh.command(f"keys create -o name {shlex.join(options)}").stdout.strip()
