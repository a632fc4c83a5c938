"""The backend port's suite on every implementation, with real processes behind each."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

import pytest
from kit.demo_answers import without_end
from kit.engine_settings import engine_settings
from kit.warm_python import warm
from warm_guardian import warm_guardians

from runner_svc.backend import engine_process
from runner_svc.backend.port import CallInfo
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LAUNCHER, LlamaServerModel
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from runner_svc.runtimes.openai_remote.openai_remote_backend import OpenAiRemote
from runner_svc.runtimes.openai_remote.runtime import OpenAiRemoteModel
from runner_svc.runtimes.server.runtime import ServerModel
from runner_svc.runtimes.server.server_backend import ServerBackend
from runner_svc.runtimes.vllm.runtime import VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft_app.compose.demo import demo_model_path
from weft_testing.conformance.backend import (
    BackendConformance,
    BackendRuns,
    Engine,
    LoadOrderChecks,
    ProcessChecks,
    RequestChecks,
)
from weft_testing.conformance.backend_steps import ANSWER_TOKENS, MAX_LOG_BYTES, call, chat, collect, failure, run
from weft_testing.fake_backend.process import fake_backend_command


@pytest.fixture(autouse=True, scope="module")
def _warm_engines() -> Iterator[None]:
    """Forks the fakes and their guardians; the real engine and its guardian are ordinary programs.

    Looks ten times as often whether a load moves, too.
    """
    with warm_guardians(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "LOAD_CHECK_SECONDS", 0.05)
        yield


PROGRAM = warm("weft_testing.fake_backend")
SHORT_GRACES = StopGraces(first_term_seconds=0.3, second_term_seconds=0.3)
MANY_PROCESSES = pytest.mark.slow("a process per check; the checks of one fake are in the fast tier")

FAKE_SWITCHES: dict[Engine, dict[str, Any]] = {
    Engine.NORMAL: {"answer_tokens": 2 * ANSWER_TOKENS},
    Engine.SLOW: {"answer_tokens": 0, "tokens_per_second": 20},
    Engine.NEVER_READY: {"never_healthy": True},
    Engine.EXITS_AT_START: {"exit_at_start": 3},
    Engine.IGNORES_SIGTERM: {"ignore_sigterm": True},
    Engine.NOISY: {"stderr_flood_bytes": MAX_LOG_BYTES},
    Engine.WITH_DESCENDANT: {"fork_grandchild": True},
}


def fake_command(*arguments: str, **switches: Any) -> tuple[str, ...]:
    """Of the warm server: how this program starts is not the subject here."""
    command = fake_backend_command(*arguments, **switches)
    return (*PROGRAM, *command[len(PROGRAM) :])


def stall_seconds(engine: Engine) -> float:
    """A start that moves is left its time."""
    return 0.3 if engine is Engine.NEVER_READY else 1.5


class TestLlamaServerBackendOverTheFake(BackendConformance):
    def make_variant(self) -> Path:
        return Path(__file__).with_name("test_placement_conformance.py")

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        return LlamaServerBackend(
            *engine_settings(
                LlamaServerModel,
                command=fake_command(**FAKE_SWITCHES[engine]),
                path=Path(__file__),
                name="fake",
                slots=1 if engine is Engine.SLOW else 4,
                load_stall_seconds=stall_seconds(engine),
                graces=SHORT_GRACES,
            )
        )


@MANY_PROCESSES
class TestServerBackendOverTheFake(BackendConformance):
    """The suite on a program that is told its port and takes its key from a variable of its own."""

    def make_backend(self, engine: Engine) -> ServerBackend:
        switches = FAKE_SWITCHES[engine]
        flags = ("--port", "{port}", "--alias", "{name}", "--parallel", "{slots}", "--key-variable", "A_KEY")
        return ServerBackend(
            *engine_settings(
                ServerModel,
                command=fake_command(*flags, "--embeddings", **switches),
                name="fake",
                key_variable="A_KEY",
                operations=("chat", "completion", "embedding"),
                slots=1 if engine is Engine.SLOW else 4,
                load_stall_seconds=stall_seconds(engine),
                graces=SHORT_GRACES,
            )
        )


@MANY_PROCESSES
class TestVllmBackendOverTheFake(BackendConformance):
    def make_variant(self) -> Path:
        return Path(__file__).with_name("test_placement_conformance.py")

    def make_backend(self, engine: Engine) -> VllmBackend:
        return VllmBackend(
            *engine_settings(
                VllmModel,
                command=fake_command(**FAKE_SWITCHES[engine]),
                model="org/model",
                name="fake",
                slots=1 if engine is Engine.SLOW else 4,
                load_stall_seconds=stall_seconds(engine),
                graces=SHORT_GRACES,
            )
        )


class SeparateServer:
    """A fake that weft did not start. `end` and `begin_again` keep its port."""

    def __init__(self, engine: Engine) -> None:
        self._switches = FAKE_SWITCHES[engine]
        self._flags = ("--parallel", "1" if engine is Engine.SLOW else "4", "--embeddings", "--api-key", "upstream-key")
        self._port = "0"
        self.begin_again()

    def begin_again(self) -> None:
        command = fake_command("--die-with-parent", *self._flags, "--port", self._port, **self._switches)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().removeprefix("listening on ").strip()
        self._port = self.url.rpartition(":")[2]

    def end(self) -> None:
        with self._process as process:
            process.kill()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None


@MANY_PROCESSES
class TestAttachedServerOverTheFake(BackendConformance):
    """The suite on a server that weft did not start: what it says about processes and their output is turned round."""

    servers: ClassVar[list[SeparateServer]] = []

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _servers(cls) -> Iterator[None]:
        cls.servers = []
        yield
        for server in cls.servers:
            server.end()

    def make_backend(self, engine: Engine) -> AttachedServer:
        if engine not in (Engine.NORMAL, Engine.SLOW, Engine.NEVER_READY):
            raise SkipTest("how a server starts, ends and logs is not ours")
        self.servers.append(SeparateServer(engine))
        return AttachedServer(
            *engine_settings(
                OpenAiHttpModel,
                url=self.servers[-1].url + "/v1",
                upstream_model="fake",
                api_key_env="UPSTREAM_KEY",
                environment={"UPSTREAM_KEY": "upstream-key"},
                probe_interval_seconds=0.05,
                load_stall_seconds=0.5,
            )
        )

    async def test_start_returns_what_the_model_can_do(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, facts):
            assert Operation.CHAT in facts.operations
            assert backend.process_id is None

    async def test_a_cancelled_start_leaves_no_process(self) -> None:
        backend = self.make_backend(Engine.NEVER_READY)
        starting = asyncio.create_task(backend.start())
        await asyncio.sleep(0.1)
        starting.cancel()
        await asyncio.wait({starting}, timeout=self.stop_seconds)
        assert starting.cancelled()
        assert self.servers[-1].runs

    async def test_a_killed_engine_is_reported_by_wait_exit_and_to_the_running_stream(self) -> None:
        async with self._running(Engine.SLOW) as (backend, _):
            watch = asyncio.create_task(backend.wait_exit())
            stream = backend.generate(chat(max_tokens=2000), call())
            await anext(stream)
            assert not watch.done()
            self.servers[-1].end()
            async with asyncio.timeout(self.notice_seconds):
                assert await failure(collect(stream)) is Reason.SERVER_DIED
                report = await watch
            assert (report.reason, report.how) == (Reason.CONNECT_FAILED, "the server stopped answering")

    async def test_a_backend_starts_again_after_its_engine_died(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            self.servers[-1].end()
            async with asyncio.timeout(self.notice_seconds):
                await backend.wait_exit()
            await backend.stop()
            assert await failure(self._start(backend)) is Reason.CONNECT_FAILED
            self.servers[-1].begin_again()
            await self._start(backend)
            assert await run(backend, chat())

    async def test_stop_leaves_no_process_and_may_be_repeated(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            await self._stop(backend)
        assert self.servers[-1].runs, "the server is not ours to end"

    async def test_a_stopped_backend_starts_again(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            await self._stop(backend)
            await self._start(backend)
            assert await run(backend, chat())

    async def test_log_lines_are_the_last_ones_and_survive_a_stop(self) -> None:
        async with self._running(Engine.NORMAL) as (backend, _):
            assert backend.log_lines(1000) == []


class TestOpenAiRemoteOverTheFake(TestAttachedServerOverTheFake):
    """The suite on a provider: a server that weft did not start, without a load."""

    def make_backend(self, engine: Engine) -> OpenAiRemote:  # type: ignore[override]  # another one on purpose
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("how a provider starts, ends and logs is not ours")
        self.servers.append(SeparateServer(engine))
        return OpenAiRemote(
            *engine_settings(
                OpenAiRemoteModel,
                url=self.servers[-1].url + "/v1",
                upstream_model="fake",
                api_key_env="UPSTREAM_KEY",
                environment={"UPSTREAM_KEY": "upstream-key"},
                operations=("chat", "embedding"),
                health_check="models",
                probe_interval_seconds=0.05,
            )
        )

    async def test_a_killed_engine_is_reported_by_wait_exit_and_to_the_running_stream(self) -> None:
        async with self._running(Engine.SLOW) as (backend, _):
            watch = asyncio.create_task(backend.wait_exit())
            stream = backend.generate(chat(max_tokens=2000), call())
            await anext(stream)
            assert not watch.done()
            self.servers[-1].end()
            async with asyncio.timeout(self.notice_seconds):
                # What became of it there, nobody can look at.
                assert await failure(collect(stream)) is Reason.BACKEND_PROTOCOL_ERROR
                report = await watch
            assert (report.reason, report.how) == (Reason.CONNECT_FAILED, "the provider stopped answering")


class EndlessServer(ServerBackend):
    """A backend whose answers end at the limit of tokens alone, as the suite expects of an engine."""

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        return super().generate(without_end(payload), call)


class EndlessLlamaServer(LlamaServerBackend):
    """As EndlessServer."""

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        return super().generate(without_end(payload), call)


@pytest.mark.real
@pytest.mark.nightly("same checks as of llama_server over it, and of this runtime over the fake")
class TestServerBackendOverLlamaCpp(BackendConformance):
    """The suite on llama.cpp's server as a program that weft knows nothing of."""

    stop_seconds = 20.0

    def make_backend(self, engine: Engine) -> ServerBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real server has no such fault switch")
        slots, context = (1, 4096) if engine is Engine.SLOW else (4, 1024)
        flags = ("--port", "{port}", "--model", "{model}", "--alias", "{name}", "--parallel", "{slots}", "--jinja")
        return EndlessServer(
            *engine_settings(
                ServerModel,
                command=(sys.executable, "-m", LAUNCHER, *flags, "--ctx-size", str(slots * context), "--threads", "1"),
                model=str(demo_model_path()),
                name="smollm2",
                key_variable="LLAMA_API_KEY",
                operations=("chat", "completion", "tokenize"),
                slots=slots,
                context_tokens=context,
            )
        )


class LlamaCppRuns(BackendRuns):
    """llama.cpp's server behind the backend of llama_server."""

    stop_seconds = 20.0

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path

    def make_variant(self) -> Path:
        variant = self._tmp_path / "variant.gguf"
        variant.symlink_to(demo_model_path())
        return variant

    def make_backend(self, engine: Engine) -> LlamaServerBackend:
        if engine not in (Engine.NORMAL, Engine.SLOW):
            raise SkipTest("the real server has no such fault switch")
        return EndlessLlamaServer(
            *engine_settings(
                LlamaServerModel,
                command=(sys.executable, "-m", LAUNCHER),
                path=demo_model_path(),
                name="smollm2",
                slots=1 if engine is Engine.SLOW else 4,
                context_tokens=4096 if engine is Engine.SLOW else 1024,
            )
        )


@pytest.mark.real
@pytest.mark.slow("a real engine")
class TestLlamaServerBackendOverLlamaCpp(LlamaCppRuns, LoadOrderChecks, RequestChecks):
    """Its answers, and what it is started with."""


@pytest.mark.real
@pytest.mark.nightly("same checks as over the fake, with ten more starts of a real engine")
class TestLlamaServerProcessOverLlamaCpp(LlamaCppRuns, ProcessChecks):
    """Its start, death and stop."""
