"""A mesh with two declared devices, on which engines of two runners take turns, watched and loaded from outside."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil
from kit.ledger_checker import LedgerChecker, Sample, SeenDevice, SeenLease
from kit.quick_weft import within
from mesh_process import MeshProcess, alive, eventually

from weft.kernel.errors.reasons import Reason

SERVED, QUANTIZED = "served", "quantized"
"""The runners: of vLLM, and of llama.cpp's server."""
WIDE, NARROW, SLIM = (f"{name}-{os.getpid()}" for name in ("wide", "narrow", "slim"))
"""The models: that of vLLM, which is split over both devices, and two of llama.cpp, which fit on one each. Engines are
told from those of other tests on this machine by their names."""
MODELS = (WIDE, NARROW, SLIM)
DEVICE_MB = 3000
WIDE_MB = 4000
NARROW_MB = 2000
LEASE_SECONDS = 3.0
SAMPLE_SECONDS = 0.05
NAME_FLAGS = ("--alias", "--served-model-name")
"""Flags with the name of the model in the command line of an engine."""
REASONS = frozenset(reason.name.lower() for reason in Reason)
LONG_TOKENS = 200
SETTLED_SECONDS = 5.0

SECTIONS: dict[str, Any] = {
    "accelerators": {"declared": [{"name": name, "memory_mb": DEVICE_MB} for name in ("left", "right")]},
    "registry": {"restart_grace_seconds": 1.0},
}
"""What weft.yaml has beside the runners."""
QUICK = within(
    {
        "registry_svc.registry_config:LedgerConfig": {
            "lease_time_to_live_seconds": LEASE_SECONDS,
            "renew_interval_seconds": 0.5,
        }
    }
)


def runner_of_llama(model: str, **switches: Any) -> dict[str, Any]:
    """Returns the runner with two models, each of which fits beside the other and not beside vLLM's."""
    shared = {"path": model, "memory_mb": NARROW_MB, "slots": 2, "threads": 1, "context_tokens": 2048}
    models = [{"name": name, **shared, "start_asleep": name == SLIM} for name in (NARROW, SLIM)]
    return {"name": QUANTIZED, "runtime": "llama_server", "models": models, **switches}


def runner_of_vllm(model: str, command: Sequence[str], **settings: Any) -> dict[str, Any]:
    """Returns the runner with the model that needs both devices."""
    wide = {
        "name": WIDE,
        "model": model,
        "memory_mb": WIDE_MB,
        "slots": 2,
        "context_tokens": 2048,
        "tensor_parallel": 1,  # a processor computes it as one
        "dtype": "bfloat16",
        "extra_arguments": ["--enforce-eager"],
        "start_asleep": True,
    }
    return {"name": SERVED, "runtime": "vllm", "command": list(command), "models": [wide], **settings}


@dataclass(slots=True)
class Outcomes:
    """What became of the requests."""

    answered: Counter[str] = field(default_factory=Counter)
    """Whole answers by model."""
    failed: Counter[str] = field(default_factory=Counter)
    """Reasons of those that were not answered."""
    untyped: list[str] = field(default_factory=list)
    """Ends that are neither an answer nor one of the reasons."""

    def take(self, model: str, status: int, body: dict[str, Any], *, complete: bool) -> None:
        """Records the end of one request."""
        error = body.get("error")
        code = error.get("code") if isinstance(error, dict) else None
        if error is not None and code in REASONS:
            self.failed[str(code)] += 1
        elif error is None and status == 200 and complete:
            self.answered[model] += 1
        else:
            self.untyped.append(f"{model}: {status} {json.dumps(body)[:300]}")


class TwoDevices:
    """The mesh, and what its ledger and its engines were seen to do."""

    def __init__(self, mesh: MeshProcess, http: aiohttp.ClientSession) -> None:
        self.mesh = mesh
        self.checker = LedgerChecker()
        self.outcomes = Outcomes()
        self._http = http
        self._known: dict[int, tuple[psutil.Process, str | None]] = {}

    async def leases(self) -> list[dict[str, Any]]:
        """Returns every lease there is."""
        return [lease for host in await self._hosts() for lease in host["leases"]]

    async def lease_of(self, model: str) -> dict[str, Any] | None:
        """Returns the lease that a model holds."""
        found = [lease for lease in await self.leases() if lease["purpose"] == model and lease["state"] == "held"]
        return found[0] if found else None

    def engines(self) -> dict[Hashable, str]:
        """Returns the model of each process of an engine that lives."""
        present = set(psutil.pids())
        for gone in self._known.keys() - present:
            del self._known[gone]
        for number in sorted(present - self._known.keys()):
            with suppress(psutil.Error):
                process = psutil.Process(number)
                model = self._model_of(process)
                # A young one may still have the command line of what started it.
                if model is not None or time.time() - process.create_time() > SETTLED_SECONDS:
                    self._known[number] = (process, model)
        engines = {process: model for process, model in self._known.values() if model is not None}
        return {process: engines[process] for process in alive(engines)}

    def _model_of(self, process: psutil.Process) -> str | None:
        """The model that the command line of an engine names, or of the engine that started this process."""
        words = process.cmdline()
        for flag in NAME_FLAGS:
            if flag in words[:-1] and (name := words[words.index(flag) + 1]) in MODELS:
                return name
        _, model = self._known.get(process.ppid(), (None, None))
        return model

    async def ask(self, model: str, *, tokens: int, stream: bool) -> None:
        """Asks once, and records what became of it."""
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}]}
        body |= {"max_tokens": tokens, "stream": stream, "temperature": 0}
        async with self._http.post("/v1/chat/completions", json=body) as answer:
            if not stream or answer.status != 200:
                self.outcomes.take(model, answer.status, await answer.json(), complete=True)
                return
            lines = [line[5:].strip() async for line in answer.content if line.startswith(b"data:")]
        events = [json.loads(line) for line in lines if line != b"[DONE]"]
        last = next((event for event in events if "error" in event), events[-1] if events else {})
        self.outcomes.take(model, answer.status, last, complete=bool(lines) and lines[-1] == b"[DONE]")

    async def kill_runner(self, runner: str, model: str) -> None:
        """Kills a runner with SIGKILL while its engine answers; the engine outlives it, as its guardian is frozen."""
        asking = asyncio.create_task(self.ask(model, tokens=LONG_TOKENS, stream=True))

        async def works() -> bool:
            described = await self.mesh.describe(runner)
            return described.model == model and bool(described.active_request_ids)

        await eventually(works, 300.0, f"{runner} gets no request")
        lease = await self.lease_of(model)
        assert lease is not None
        victim = next(process for process in self.mesh.family() if _is_runner(process, runner))
        guardians = [child for child in victim.children() if "guardian.py" in " ".join(child.cmdline())]
        assert guardians, "the engine has no guardian"
        engines = {process for process, of in self.engines().items() if of == model}
        assert engines, "there is no engine"
        for guardian in guardians:
            os.kill(guardian.pid, signal.SIGSTOP)
        victim.kill()
        seen = self.checker.samples
        await eventually(lambda: self.checker.samples > seen + 1, 30.0, "the ledger is not read")
        assert engines <= self.engines().keys(), "the engine does not outlive its runner"
        await asking

        async def is_over() -> bool:
            return lease["leaseId"] not in {each["leaseId"] for each in await self.leases()}

        await eventually(is_over, 120.0, f"the lease of {model} is kept for ever")
        assert not engines & self.engines().keys()

    async def kill_under_load(self, runner: str, model: str, requests: int) -> None:
        """Kills a runner as `kill_runner` does while all models are asked, and asks all of them again."""
        loading = asyncio.create_task(mixed_load(self, requests=requests))
        try:
            await self.kill_runner(runner, model)
        finally:
            await loading
        self.outcomes.answered.clear()
        await mixed_load(self, requests=1)

    async def _hosts(self) -> list[dict[str, Any]]:
        async with self._http.get("/v1/admin/gpu-memory") as answer:
            return list((await answer.json())["hosts"])

    async def watch(self) -> None:
        """Reads the ledger until cancelled."""
        while True:
            before = self.engines()
            hosts = await self._hosts()
            after = self.engines()
            through = {process: model for process, model in before.items() if process in after}
            for host in hosts:
                self.checker.note(_sample(host, through))
            await asyncio.sleep(SAMPLE_SECONDS)


@asynccontextmanager
async def watched(mesh: MeshProcess) -> AsyncIterator[TwoDevices]:
    """Reads the ledger from the begin to the end of the block; what contradicts its rules fails at the end."""
    timeout = aiohttp.ClientTimeout(total=900.0)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as http:
        stage = TwoDevices(mesh, http)
        watching = asyncio.create_task(stage.watch())
        try:
            yield stage
            assert not watching.done(), watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})
    assert stage.checker.broken == []
    assert stage.outcomes.untyped == []


async def mixed_load(stage: TwoDevices, *, requests: int, turns: int = 0) -> None:
    """Asks for all models at once, two callers each, so often per caller and until each model was loaded so often."""

    def is_over() -> bool:
        return all(len(stage.checker.granted(model)) >= turns for model in MODELS)

    async def ask_on(model: str) -> None:
        number = 0
        while number < requests or not is_over():
            # Every second one is a stream.
            await stage.ask(model, tokens=4 + 4 * number % 12, stream=bool(number % 2))
            number += 1

    await asyncio.gather(*(ask_on(model) for model in MODELS for _ in range(2)))


def _sample(host: dict[str, Any], engines: dict[Hashable, str]) -> Sample:
    return Sample(
        devices=tuple(
            SeenDevice(
                index=device["index"],
                leasable_bytes=device["totalBytes"] - device["marginBytes"],
                booked_bytes=device["bookedBytes"],
            )
            for device in host["devices"]
        ),
        leases=tuple(
            SeenLease(
                lease_id=lease["leaseId"],
                fencing_number=lease["fencingNumber"],
                model=lease["purpose"],
                shares={int(index): amount for index, amount in lease["bytesByDevice"].items()},
            )
            for lease in host["leases"]
        ),
        engines=engines,
    )


def _is_runner(process: psutil.Process, runner: str) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()
        return "serve" in words and "--runner" in words and words[words.index("--runner") + 1] == runner
    return False
