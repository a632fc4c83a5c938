"""What the registry costs with many runners, how fast its news travel, and what its absence does to requests."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import msgspec
import psutil

from bench import measures
from bench.contender import MODEL, WEFT
from bench.cpu import MB
from bench.launch import SERVE_POLL_SECONDS, Apart, LaunchError, post, whole_mesh
from bench.load import DRAIN_SECONDS, Job, Result
from bench.report import Figures
from bench.scenarios import Options, chat
from bench.sessions import SessionJob, SessionResult
from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc

WATCHERS_OF_A_MESH = 2
"""A router and a gateway."""
WATCHERS_OF_NEWS = 50
PROBES_PER_SECOND = 20.0
SAMPLE_SECONDS = 0.25
OUTAGE_CONNECTIONS = 4
OUTAGE_TOKENS = 8
LEAD_SECONDS = 5.0
"""Load before the registry is killed, and after it is back."""
RETURN_SECONDS = 120.0

OUTAGE_CONFIG = f"""\
port: 0
runners:
  - name: bench
    command: ["{sys.executable}", "-m", "weft_testing.fake_backend", "--tokens-per-second", "20"]
    models:
      - name: {MODEL}
        path: "{__file__}"
        slots: 8
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the registry had used at a moment."""

    at: float
    """`time.time()`."""
    cpu_seconds: float
    rss: int


def measure_registry(options: Options, figures: Figures, folder: Path) -> None:
    """CPU and memory with many sessions, then how old news are when watchers have them."""
    with Apart(folder / "crowd", "port: 0\n") as mesh:
        process, address = mesh.start(sys.executable, "registry")
        steady = SessionJob(
            address=address, sessions=options.sessions, seconds=options.session_seconds, watchers=WATCHERS_OF_A_MESH
        )
        result, samples = played(steady, process, options.root)
        _add_crowd(figures, result, within(samples, result), options)
    with Apart(folder / "news", "port: 0\n") as mesh:
        process, address = mesh.start(sys.executable, "registry")
        news = SessionJob(
            address=address,
            sessions=options.sessions,
            seconds=options.session_seconds,
            changing=False,
            watchers=WATCHERS_OF_NEWS,
            probes_per_second=PROBES_PER_SECOND,
        )
        result, _ = played(news, process, options.root)
        _add_news(figures, result, options)


def measure_outage(options: Options, figures: Figures, folder: Path) -> None:
    """Requests while the registry is killed, away and back; every failure counts, and every row that is gone."""
    with whole_mesh(sys.executable, folder / "outage", OUTAGE_CONFIG) as (mesh, registry, url):
        port = urlsplit(url).port or 0
        _until_it_answers(port)
        job = Job(
            port=port,
            path="/v1/chat/completions",
            body={"model": MODEL, **chat(OUTAGE_TOKENS, stream=True)},
            connections=OUTAGE_CONNECTIONS,
            seconds=options.outage_seconds + 2 * LEAD_SECONDS,
            min_events=OUTAGE_TOKENS,
        )
        with _generator("bench.load", job, options.root) as asked:
            time.sleep(LEAD_SECONDS)
            registry.kill()
            time.sleep(options.outage_seconds)
            _, address = mesh.start(sys.executable, "registry")
            at_once = _models(address)
            result = _result_of(asked, job)
        _until_active(address)
    note = f"{result.requests} requests, {options.outage_seconds:g} s away"
    failures = sum(result.failures.values())
    figures.add(measures.OUTAGE_FAILURES, WEFT.name, failures, f"{note}; {result.failures}" if failures else note)
    figures.add(measures.OUTAGE_DELETED, WEFT.name, 1 - len(at_once), note)


def played(job: SessionJob, process: psutil.Process, root: Path) -> tuple[SessionResult, list[Sample]]:
    """Run the generator, and sample the registry meanwhile."""
    with _generator("bench.sessions", job, root) as generator:
        samples: list[Sample] = []
        while generator.poll() is None:
            times = process.cpu_times()
            samples.append(Sample(time.time(), times.user + times.system, process.memory_info().rss))
            time.sleep(SAMPLE_SECONDS)
        return msgspec.json.decode(_output_of(generator), type=SessionResult), samples


def within(samples: Sequence[Sample], result: SessionResult) -> list[Sample]:
    """Those of the time in which heartbeats went out."""
    return [sample for sample in samples if result.began <= sample.at <= result.began + result.wall_seconds]


def _add_crowd(figures: Figures, result: SessionResult, samples: Sequence[Sample], options: Options) -> None:
    if len(samples) < 2:
        raise LaunchError("the run was too short to be sampled")
    first, last = samples[0], samples[-1]
    note = (
        f"{options.sessions} sessions, {result.heartbeats / result.wall_seconds:.0f} reports/s, all different, "
        f"{WATCHERS_OF_A_MESH} watchers; opened in {result.opening_seconds:.1f} s"
    )
    if result.failures:
        note += f"; failures: {result.failures}"
    share = 100 * (last.cpu_seconds - first.cpu_seconds) / (last.at - first.at)
    figures.add(measures.REGISTRY_CPU, WEFT.name, share, note)
    figures.add(measures.REGISTRY_RSS, WEFT.name, max(sample.rss for sample in samples) / MB, note)


def _add_news(figures: Figures, result: SessionResult, options: Options) -> None:
    note = f"{result.news} of {result.news_expected} arrived; {options.sessions} sessions send reports meanwhile"
    if result.failures:
        note += f"; failures: {result.failures}"
    figures.add(measures.NEWS_P50, WEFT.name, result.news_p50, note)
    figures.add(measures.NEWS_P99, WEFT.name, result.news_p99, note)
    figures.add(measures.NEWS_LOST, WEFT.name, result.news_expected - result.news, note)


@contextmanager
def _generator(module: str, job: SessionJob | Job, root: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A generator process that has its job; ended with the block."""
    generator = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    )
    try:
        assert generator.stdin is not None
        generator.stdin.write(msgspec.json.encode(job))
        generator.stdin.close()
        yield generator
    finally:
        generator.kill()
        generator.wait()


def _result_of(generator: "subprocess.Popen[bytes]", job: Job) -> Result:
    output = _output_of(generator, job.seconds + DRAIN_SECONDS)
    return msgspec.json.decode(output, type=Result)


def _output_of(generator: "subprocess.Popen[bytes]", seconds: float = DRAIN_SECONDS) -> bytes:
    assert generator.stdout is not None
    output = generator.stdout.read()
    if generator.wait(seconds) != 0:
        raise LaunchError(f"the generator failed with exit code {generator.returncode}")
    return output


def _until_it_answers(port: int) -> None:
    deadline = time.monotonic() + RETURN_SECONDS
    while True:
        try:
            post(port, "/v1/chat/completions", {"model": MODEL, **chat(1, stream=False)})
        except (OSError, LaunchError):
            if time.monotonic() > deadline:
                raise
            time.sleep(SERVE_POLL_SECONDS)
        else:
            return


def _models(address: str) -> list[model_pb2.Model]:
    with grpc.insecure_channel(address) as channel:
        stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
        request = registry_service_pb2.ListModelsRequest()
        return list(stub.ListModels(request, timeout=10.0, wait_for_ready=True).models)


def _until_active(address: str) -> None:
    """The runner has come back by itself. Raises LaunchError."""
    deadline = time.monotonic() + RETURN_SECONDS
    while any(model.status != model_pb2.Model.STATUS_ACTIVE for model in _models(address)):
        if time.monotonic() > deadline:
            raise LaunchError("the runner did not come back to its registry")
        time.sleep(SERVE_POLL_SECONDS)
