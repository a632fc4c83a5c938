"""The gRPC clients in Node.js, Go and C++: built as their page says, and run against meshes of real processes."""

import asyncio
import re
import signal
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from pathlib import Path

import pytest
from client_programs import COMMANDS, ClientProgram, build_steps
from keyed_router import MODEL, KeyedRouter
from mesh_process import MeshProcess

from weft_testing.certificates import Authority

pytestmark = [pytest.mark.polyglot, pytest.mark.timeout(900)]

RUN_SECONDS = 30.0
STOP_SECONDS = 2.0
ANSWER = "tok0 tok1 tok2"


@dataclass(frozen=True, slots=True)
class Ended:
    """What a program left."""

    code: int
    out: str
    errors: str

    @property
    def request_id(self) -> str:
        """What it said its request's id is."""
        found = re.search(r"^request: (\S+)$", self.errors, re.MULTILINE)
        assert found is not None, self.errors
        return found[1]


async def start(program: ClientProgram, *words: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *program.command,
        *words,
        cwd=program.folder,
        env=program.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
    )


async def ended(process: Process, read: str = "") -> Ended:
    """Waits for the end; `read` has been read of its output already."""
    try:
        async with asyncio.timeout(RUN_SECONDS):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Ended(process.returncode or 0, read + out.decode(), errors.decode())


async def run(program: ClientProgram, *words: str) -> Ended:
    return await ended(await start(program, *words))


def at(mesh: MeshProcess, model: str) -> tuple[str, ...]:
    return ("--address", str(mesh.facts["grpcPort"]), "--model", model)


def at_router(router: KeyedRouter, key: str) -> tuple[str, ...]:
    return ("--address", router.address, "--ca", str(router.ca_file), "--key", key, "--model", MODEL)


async def test_answer_streams_and_ends_with_its_receipt(program: ClientProgram, mesh: MeshProcess) -> None:
    done = await run(program, *at(mesh, "m-talk"), "Why is the sky blue?")
    assert (done.code, done.out.strip()) == (0, ANSWER), done.errors
    assert f"receipt: {done.request_id} OUTCOME_COMPLETED by talk, 3 tokens" in done.errors
    assert mesh.request_line(done.request_id)["outcome"] == "completed"


async def test_ctrl_c_mid_answer_stops_the_backend(program: ClientProgram, mesh: MeshProcess) -> None:
    async with await mesh.backend("endless") as backend:
        before = (await backend.state()).requests_cancelled
        process = await start(program, *at(mesh, "m-endless"), "hi")
        assert process.stdout is not None
        async with asyncio.timeout(RUN_SECONDS):
            read = await process.stdout.readuntil(b"tok1")
        process.send_signal(signal.SIGINT)
        done = await ended(process, read.decode())
        await backend.wait_for_state(lambda state: state.requests_cancelled == before + 1, seconds=STOP_SECONDS)
    assert done.code == 130, done.errors
    assert "receipt" not in done.errors
    assert done.request_id


async def test_deadline_ends_the_answer_and_stops_the_backend(program: ClientProgram, mesh: MeshProcess) -> None:
    async with await mesh.backend("endless") as backend:
        before = (await backend.state()).requests_cancelled
        done = await run(program, *at(mesh, "m-endless"), "--deadline", "2", "hi")
        await backend.wait_for_state(lambda state: state.requests_cancelled == before + 1, seconds=STOP_SECONDS)
    assert done.code == 5, done.errors
    assert done.out.startswith("tok0")


async def test_unknown_model_is_an_error_with_its_reason_and_a_receipt(
    program: ClientProgram, mesh: MeshProcess
) -> None:
    done = await run(program, *at(mesh, "m-none"), "hi")
    assert (done.code, done.out) == (3, "")
    assert "error: MODEL_NOT_FOUND (" in done.errors
    assert "m-none" in done.errors
    assert f"receipt: {done.request_id} OUTCOME_REJECTED by no runner" in done.errors


async def test_unreachable_mesh_is_an_error_without_a_reason(program: ClientProgram) -> None:
    done = await run(program, "--address", "127.0.0.1:1", "hi")
    assert (done.code, done.out) == (7, "")
    assert "error: no reason (" in done.errors


@pytest.mark.parametrize("words", [(), ("--no-such-flag", "hi"), ("--deadline", "0", "hi")])
async def test_usage_error_is_reported_before_anything_is_sent(program: ClientProgram, words: tuple[str, ...]) -> None:
    done = await run(program, *words)
    assert (done.code, done.out) == (2, "")
    assert "usage" in done.errors.lower()


async def test_key_is_accepted_over_tls(program: ClientProgram, router: KeyedRouter) -> None:
    done = await run(program, *at_router(router, router.key), "hi")
    assert (done.code, done.out.strip()) == (0, ANSWER), done.errors
    assert f"receipt: {done.request_id} OUTCOME_COMPLETED by talk" in done.errors


@pytest.mark.parametrize("key", ["weft_aaaaaaaaaaaa_wrong", ""])
async def test_missing_or_invalid_key_returns_unauthenticated(
    program: ClientProgram, router: KeyedRouter, key: str
) -> None:
    done = await run(program, *at_router(router, key), "hi")
    assert (done.code, done.out) == (6, ""), done.errors
    assert "error: UNAUTHENTICATED (" in done.errors


async def test_certificate_of_another_ca_is_not_trusted(
    program: ClientProgram, router: KeyedRouter, tmp_path: Path
) -> None:
    """The control: a client that checked no certificates would get its answer here."""
    other = tmp_path / "other.pem"
    other.write_bytes(Authority().root)
    words = ("--address", router.address, "--ca", str(other), "--key", router.key, "--model", MODEL)
    done = await run(program, *words, "--deadline", "5", "hi")
    assert done.out == ""
    assert done.code in (5, 7), done.errors


async def test_plaintext_client_gets_nothing_from_a_tls_router(program: ClientProgram, router: KeyedRouter) -> None:
    words = ("--address", router.address, "--key", router.key, "--model", MODEL, "--deadline", "5", "hi")
    done = await run(program, *words)
    assert done.out == ""
    assert done.code in (5, 7), done.errors


@pytest.mark.parametrize("language", sorted(COMMANDS))
def test_page_has_the_build_commands_of_each_program(language: str) -> None:
    steps = build_steps(language)
    assert any(step.startswith("cd examples/clients/") for step in steps)
