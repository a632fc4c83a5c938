"""Scenarios with the real model: the same llama.cpp process through the mesh and directly, and a cold start."""

import contextlib
import http.client
import shutil
import sys
import time
from pathlib import Path

import msgspec
import psutil

from bench import measures
from bench.contender import WEFT, WEFT_REAL
from bench.launch import LaunchError, Target, free_port, run_load, running, started
from bench.load import CONTENT, Job, Result
from bench.measures import Measure
from bench.report import Figures
from bench.scenarios import Options

MODEL_SLOTS = 4
COLD_START_LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.02
KEY_VARIABLE = "LLAMA_API_KEY"
LONG_PROMPT = "Write a long essay of two thousand words on the history of the Roman Empire, with many details."
"""Far from over after the tokens that are asked for: `ignore_eos` is not part of the API."""


def measure_real(options: Options, figures: Figures, folder: Path, stub: Target) -> None:
    """Tokens per second through the mesh over tokens per second asked directly, in turns."""
    with running(WEFT_REAL, options.root, folder, stub) as target:
        for connections, ratio, rate in (
            (1, measures.REAL_RATIO_ONE, measures.REAL_TOKENS_ONE),
            (MODEL_SLOTS, measures.REAL_RATIO_MANY, measures.REAL_TOKENS_MANY),
        ):
            _measure_ratio(options, figures, target, connections, (ratio, rate))


def _measure_ratio(
    options: Options, figures: Figures, target: Target, connections: int, into: tuple[Measure, Measure]
) -> None:
    mesh, direct = mesh_job(options, target, connections), direct_job(options, target, connections)
    for job in (direct, mesh):
        run_load(msgspec.structs.replace(job, max_requests=connections), options.root)
    ratio, rate = into
    for repetition in range(options.repetitions):
        rates: dict[bool, float] = {}
        # The second one finds the processor warmer; so each is second half of the time.
        for through_mesh in (False, True) if repetition % 2 else (True, False):
            result = run_load(mesh if through_mesh else direct, options.root)
            rates[through_mesh] = result.tokens / result.wall_seconds
            name = WEFT.name if through_mesh else "llama.cpp (direct)"
            figures.add(rate, name, rates[through_mesh], _note(result, options))
        figures.add(ratio, WEFT.name, rates[True] / rates[False])


def mesh_job(options: Options, target: Target, connections: int) -> Job:
    """A long answer through the gateway."""
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": LONG_PROMPT}],
        "max_tokens": options.real_tokens,
        "temperature": 0,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return target.job(
        body, connections=connections, seconds=600.0, max_requests=connections * options.real_requests, min_events=1
    )


def direct_job(options: Options, target: Target, connections: int) -> Job:
    """The same to the backend's own port, with the key that its runner gave it."""
    key = target.stub.environ()[KEY_VARIABLE]
    return msgspec.structs.replace(
        mesh_job(options, target, connections), port=target.stub_port, headers={"Authorization": f"Bearer {key}"}
    )


def _note(result: Result, options: Options) -> str:
    expected = result.requests * options.real_tokens
    short = "" if result.tokens == expected else f"{result.tokens} of {expected} tokens"
    return short or (f"{sum(result.failures.values())} failed" if result.failures else "")


def measure_cold_start(options: Options, figures: Figures, folder: Path) -> None:
    """Wall seconds from `weft up` on an empty home to the first token of a stream."""
    for repetition in range(options.repetitions):
        home, port = folder / f"home-{repetition}", free_port()
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(Path(sys.executable).with_name("weft")), "up", "--home", str(home), "--port", str(port)]
        begin = time.perf_counter()
        with started(command, {}, folder / "output.log") as process:
            _until_first_token(process, port, begin + COLD_START_LIMIT_SECONDS)
            figures.add(measures.COLD_START, WEFT.name, time.perf_counter() - begin)
        shutil.rmtree(home, ignore_errors=True)


def _until_first_token(process: psutil.Process, port: int, deadline: float) -> None:
    while time.perf_counter() < deadline:
        if process.status() == psutil.STATUS_ZOMBIE:
            raise LaunchError("weft up ended before its first token")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _streams_content(port):
                return
        time.sleep(POLL_SECONDS)
    raise LaunchError(f"no token within {COLD_START_LIMIT_SECONDS:.0f} s of weft up")


def _streams_content(port: int) -> bool:
    """Ask for a short stream; whether a token came."""
    body = {
        "model": WEFT_REAL.model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 8,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=COLD_START_LIMIT_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", WEFT_REAL.chat_path, msgspec.json.encode(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        seen = b""
        while response.status == 200 and (piece := response.read1()):
            seen += piece
            if CONTENT.search(seen):
                return True
    return False
