"""What the mesh costs over each engine asked directly: the same engine, the same prompt, in turns."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jinja2.sandbox
import msgspec
import psutil
import yaml

from bench import measures
from bench.contender import BACKEND_ROLE, WEFT, Contender
from bench.cpu import CpuSnapshot, listening_port, roles_of_tree, snapshot
from bench.launch import LaunchError, answering, free_port, run_load, started, until_it_answers
from bench.load import Job, Result
from bench.report import Figures
from bench.scenarios import Options
from runner_svc.runtimes.ctranslate2.arguments import SERVER_PROGRAM
from runner_svc.runtimes.library_server import program_command
from runner_svc.runtimes.llama_server.runtime import llama_command
from weft_app.compose.demo import demo_model_path

MODEL = "engine"
SLOTS = max(measures.ENGINE_STREAMS)
CONTEXT_TOKENS = 512
"""Of one slot: the prompt and the longest answer."""
THREADS = 1
"""Of the engine: the mesh and what asks it need a core too."""
START_SECONDS = 600.0
STOP_SECONDS = 30.0
FIRST_TOKENS = 4
WARM_TOKENS = 16
MESSAGES = [
    {
        "role": "user",
        "content": "Write a long essay of two thousand words on the history of the Roman Empire, with many details.",
    }
]
"""Its answer is far from over after the tokens that are asked for."""
ENVIRONMENTS = ".venv-runtimes"
"""Folder in the repository with the engines that `make test-runtimes` installs."""
ATTACHED_KEY = "WEFT_BENCH_ENGINE_KEY"
KEY = "sk-bench-0123456789abcdefghij"
BACKEND_MARKERS = (*("xllamacpp_launcher", "xllamacpp_server", "llama-server", "/bin/vllm", SERVER_PROGRAM),)


ENGINE = Contender(name="engine", command=(), model=MODEL, main_role=BACKEND_ROLE)
"""An engine that the bench itself starts."""


class MissingEngineError(Exception):
    """An engine that is not installed on this machine, with what installs it."""


class Side(Protocol):
    """One way to an engine: through the mesh, or directly."""

    def run(self, *, streams: int, requests: int, max_tokens: int) -> Result:
        """Asks so many times, so many at once, and returns the figures."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSide:
    """An engine behind HTTP, asked by the load generator."""

    root: Path
    job: Job

    def run(self, *, streams: int, requests: int, max_tokens: int) -> Result:
        """See Side.run."""
        body = {**self.job.body, "max_tokens": max_tokens}
        return run_load(
            msgspec.structs.replace(self.job, body=body, connections=streams, max_requests=requests), self.root
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibrarySide:
    """An engine that is a library, asked by a plain loop in a process of its own."""

    process: "subprocess.Popen[str]"
    prompt: str

    def run(self, *, streams: int, requests: int, max_tokens: int) -> Result:
        """See Side.run."""
        job = {"prompt": self.prompt, "streams": streams, "requests": requests, "max_tokens": max_tokens}
        result = msgspec.json.decode(self._exchange(json.dumps(job)), type=Result)
        # What asks is the engine's own process, whose time is counted as the engine's.
        return msgspec.structs.replace(result, cpu_seconds=0.0)

    def until_loaded(self) -> None:
        """Waits until the model is loaded. Raises LaunchError."""
        self._answer()

    def _exchange(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LaunchError(f"the plain loop over the library ended with {self.process.wait()}")
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshUnderTest:
    """A mesh with one model on one engine."""

    options: Options
    folder: Path
    contender: Contender
    process: psutil.Process
    port: int
    engines: list[psutil.Process] = field(default_factory=list)
    """Engines that the mesh has not started."""

    def used(self) -> CpuSnapshot:
        """Returns the CPU time so far of the mesh and of the engines."""
        return snapshot((self.process, self.contender), *((engine, ENGINE) for engine in self.engines))

    def side(self) -> LoadSide:
        """Returns the way through the mesh."""
        return LoadSide(root=self.options.root, job=_job(port=self.port))

    def engine(self) -> psutil.Process:
        """Returns the engine's first process."""
        for pid, role in roles_of_tree(self.process, self.contender).items():
            if role == BACKEND_ROLE:
                return psutil.Process(pid)
        raise LaunchError("the mesh has started no engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUnderTest:
    """How the mesh has one engine, and how it is asked without the mesh."""

    runner: Callable[[Path], Mapping[str, Any]]
    """Returns the section of the runner without its name; takes the repository. Raises MissingEngineError."""
    direct: Callable[[MeshUnderTest, ExitStack], Side]
    """Returns the way past the mesh; what it starts ends with the stack."""
    attached: bool = False
    """Whether the bench starts the engine, a llama.cpp server, at the port `{engine_port}`."""


def measure_engines(options: Options, figures: Figures, folder: Path) -> None:
    """Measures each engine in turn; one that is not installed is skipped with what installs it."""
    for name in options.engines:
        print(f"bench: engine {name}", file=sys.stderr, flush=True)
        try:
            with ExitStack() as stack:
                mesh, direct = _start(ENGINES[name], options, folder / name, stack)
                _measure_first(options, figures, name, mesh.side(), direct)
                for streams in measures.ENGINE_STREAMS:
                    _measure_rate(options, figures, name, mesh, direct, streams)
        except (LaunchError, MissingEngineError) as error:
            figures.skipped.append(f"engine {name}: {error}")


def _start(engine: EngineUnderTest, options: Options, folder: Path, stack: ExitStack) -> tuple[MeshUnderTest, Side]:
    runner = {"name": "bench", **engine.runner(options.root)}
    config = "port: {port}\n" + yaml.safe_dump({"runners": [runner]}, width=10_000)
    contender = replace(
        WEFT,
        config=config,
        model=MODEL,
        key_command=(),
        environment={ATTACHED_KEY: KEY},
        start_seconds=START_SECONDS,
        roles={**dict.fromkeys(BACKEND_MARKERS, BACKEND_ROLE), **WEFT.roles},
    )
    values: dict[str, str] = {}
    engines: list[psutil.Process] = []
    if engine.attached:
        server, engine_port = stack.enter_context(_llama_server(folder))
        engines, values = [server], {"engine_port": str(engine_port)}
    found, process, port = stack.enter_context(answering(contender, options.root, folder / "mesh", values))
    mesh = MeshUnderTest(options=options, folder=folder, contender=found, process=process, port=port, engines=engines)
    return mesh, engine.direct(mesh, stack)


def _measure_first(options: Options, figures: Figures, name: str, mesh: Side, direct: Side) -> None:
    for side in (direct, mesh):
        side.run(streams=1, requests=3, max_tokens=FIRST_TOKENS)
    for turn in range(options.repetitions):
        times = {
            label: side.run(streams=1, requests=options.first_requests, max_tokens=FIRST_TOKENS).first_p50
            for label, side in _in_turn(mesh, direct, turn)
        }
        for label, milliseconds in times.items():
            figures.add(measures.ENGINE_FIRST[name], label, milliseconds)
        figures.add(measures.ENGINE_ADDED_FIRST[name], WEFT.name, times[WEFT.name] - times[DIRECT])


def _measure_rate(
    options: Options, figures: Figures, name: str, mesh: MeshUnderTest, direct: Side, streams: int
) -> None:
    ways: Mapping[str, Side] = {DIRECT: direct, WEFT.name: mesh.side()}
    for side in ways.values():
        side.run(streams=streams, requests=streams, max_tokens=WARM_TOKENS)
    # So many tokens altogether that a turn lasts seconds, however many streams share them.
    requests = max(streams, options.real_requests)
    for turn in range(options.repetitions):
        rates: dict[str, float] = {}
        for label, side in _in_turn(ways[WEFT.name], direct, turn):
            before = mesh.used()
            result = side.run(streams=streams, requests=requests, max_tokens=options.real_tokens)
            used = mesh.used().since(before)
            rates[label] = result.tokens / result.wall_seconds
            figures.add(measures.ENGINE_TOKENS[name, streams], label, rates[label], _note(result, requests, options))
            figures.add_use(
                f"{name}, {streams} at once, per token",
                label,
                cpu_seconds={**used, "generator": result.cpu_seconds},
                wall_seconds=result.wall_seconds,
                units=result.tokens,
                failures=sum(result.failures.values()),
            )
        figures.add(measures.ENGINE_RATIO[name, streams], WEFT.name, rates[WEFT.name] / rates[DIRECT])


DIRECT = "asked directly"


def _in_turn(mesh: Side, direct: Side, turn: int) -> Sequence[tuple[str, Side]]:
    """Returns both ways, in the other order every second turn: the second finds the processor warmer."""
    ways = ((DIRECT, direct), (WEFT.name, mesh))
    return ways[::-1] if turn % 2 else ways


def _note(result: Result, requests: int, options: Options) -> str:
    expected = requests * options.real_tokens
    if result.failures:
        return f"{sum(result.failures.values())} failed: {next(iter(result.failures))[:80]}"
    return "" if result.tokens == expected else f"{result.tokens} of {expected} tokens"


def _job(*, port: int = 0, socket: str = "", key: str = "") -> Job:
    body = {
        "model": MODEL,
        "messages": MESSAGES,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Job(
        port=port,
        socket=socket,
        path=WEFT.chat_path,
        body=body,
        headers=headers,
        seconds=START_SECONDS,
        min_events=1,
    )


def _shared() -> dict[str, Any]:
    return {"name": MODEL, "slots": SLOTS, "context_tokens": CONTEXT_TOKENS}


def _llama_runner(root: Path) -> Mapping[str, Any]:
    del root
    model = {**_shared(), "path": str(demo_model_path()), "threads": THREADS, "embeddings": False}
    return {"runtime": "llama_server", "models": [model]}


def _llama_direct(mesh: MeshUnderTest, stack: ExitStack) -> Side:
    del stack
    engine = mesh.engine()
    return LoadSide(
        root=mesh.options.root, job=_job(port=listening_port(engine), key=engine.environ()["LLAMA_API_KEY"])
    )


def _vllm_runner(root: Path) -> Mapping[str, Any]:
    program = root / ENVIRONMENTS / "vllm" / "runtimes" / "vllm" / "bin" / "vllm"
    model = {
        **_shared(),
        "model": str(_installed(_vllm_model(root), program)),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "threads": THREADS,
    }
    return {"runtime": "vllm", "command": [str(program)], "load_stall_seconds": START_SECONDS, "models": [model]}


def _vllm_direct(mesh: MeshUnderTest, stack: ExitStack) -> Side:
    del stack
    engine = mesh.engine()
    words = engine.cmdline()
    socket, key = words[words.index("--uds") + 1], engine.environ()["VLLM_API_KEY"]
    return LoadSide(root=mesh.options.root, job=_job(socket=socket, key=key))


def _vllm_model(root: Path) -> Path:
    return root / ENVIRONMENTS / "vllm" / "smollm2"


def _ctranslate2_runner(root: Path) -> Mapping[str, Any]:
    python = _ctranslate2_python(root)
    model = {
        **_shared(),
        "path": str(_installed(_ctranslate2_model(root), python)),
        "device": "cpu",
        "compute_type": "int8",
        "threads": THREADS,
    }
    return {"runtime": "ctranslate2", "command": list(program_command(SERVER_PROGRAM, str(python))), "models": [model]}


def _ctranslate2_direct(mesh: MeshUnderTest, stack: ExitStack) -> Side:
    root = mesh.options.root
    script = Path(__file__).with_name("plain_ctranslate2.py")
    command = [str(_ctranslate2_python(root)), str(script), str(_ctranslate2_model(root)), str(SLOTS), str(THREADS)]
    return _plain_loop(mesh, stack, command, _prompt(_ctranslate2_model(root)))


def _plain_loop(mesh: MeshUnderTest, stack: ExitStack, command: Sequence[str], prompt: str) -> Side:
    """Starts a plain loop over a library; it ends with its stdin."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stack.enter_context((mesh.folder / "plain.log").open("wb")),
        text=True,
    )
    stack.callback(_end, process)
    mesh.engines.append(psutil.Process(process.pid))
    side = LibrarySide(process=process, prompt=prompt)
    side.until_loaded()
    return side


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a plain loop and all that it has started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert process.stdin is not None
    process.stdin.close()
    _, alive = psutil.wait_procs(family, STOP_SECONDS)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def _prompt(folder: Path) -> str:
    """Returns the rendered conversation, by the chat template of a model."""
    template = (folder / "chat_template.jinja").read_text("utf-8")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=True)


def _ctranslate2_python(root: Path) -> Path:
    return root / ENVIRONMENTS / "ctranslate2" / "runtimes" / "ctranslate2" / "bin" / "python"


def _ctranslate2_model(root: Path) -> Path:
    return root / ENVIRONMENTS / "ctranslate2" / "smollm2"


def _attached_runner(root: Path) -> Mapping[str, Any]:
    del root
    model = {**_shared(), "url": "http://127.0.0.1:{engine_port}", "api_key_env": ATTACHED_KEY}
    return {"runtime": "openai_http", "models": [model]}


def _attached_direct(mesh: MeshUnderTest, stack: ExitStack) -> Side:
    del stack
    return LoadSide(root=mesh.options.root, job=_job(port=listening_port(mesh.engines[0]), key=KEY))


@contextmanager
def _llama_server(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """A llama.cpp server that the bench itself starts, and its port."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [
        *llama_command(None),
        *("--model", str(demo_model_path()), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(THREADS), "--parallel", str(SLOTS), "--ctx-size", str(SLOTS * CONTEXT_TOKENS), "--jinja"),
    ]
    with started(command, {"LLAMA_API_KEY": KEY}, folder / "output.log") as process:
        until_it_answers(replace(ENGINE, headers={"Authorization": f"Bearer {KEY}"}), process, port, folder)
        yield process, port


def _installed(model: Path, program: Path) -> Path:
    """Returns the folder of the model. Raises MissingEngineError where it or the program is missing."""
    for path in (model, program):
        if not path.exists():
            raise MissingEngineError(f"there is no {path}; make test-runtimes installs it")
    return model


ENGINES: Mapping[str, EngineUnderTest] = {
    "llama_server": EngineUnderTest(runner=_llama_runner, direct=_llama_direct),
    "vllm": EngineUnderTest(runner=_vllm_runner, direct=_vllm_direct),
    "ctranslate2": EngineUnderTest(runner=_ctranslate2_runner, direct=_ctranslate2_direct),
    "openai_http": EngineUnderTest(runner=_attached_runner, direct=_attached_direct, attached=True),
}
