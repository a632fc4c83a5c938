"""A runner fetches the stored prompt of another one for the same tenant, and processes the prompt if that fails."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from kit.engines import fake_model
from runner_harness import RunningRunner, events_of, ready_runner, refusal

from weft.api.common.v1 import chat_pb2, receipt_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc, ticket_pb2
from weft.dispatch.payload_description import cache_scope, prompt_prefixes
from weft.kernel.channels.rpc import new_server
from weft.kernel.errors.reasons import Reason

pytestmark = pytest.mark.slow("runs whole runners")

SEA = "sea: tell me more about the sea. " * 60
MESSAGES = [chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=SEA)])]


def _digest(tenant: str) -> int:
    return prompt_prefixes(chat_pb2.ChatPayload(messages=MESSAGES), cache_scope(tenant, ""))[0][0]


class Pair:
    """A runner that has stored a prompt of tenant a, and one that has not."""

    def __init__(self, folder: Path, holder: RunningRunner, other: RunningRunner) -> None:
        self.folder = folder
        self.holder, self.other = holder, other

    @property
    def address(self) -> str:
        return f"unix:{self.folder}/holder/runner.sock"

    def source(self, tenant: str = "a", seconds: float = 20.0, **claims: Any) -> ticket_pb2.PromptSource:
        """What a router writes into the ticket of the other runner."""
        ticket = self.holder.ticket(**{"model": "m", "tenant": tenant, "moved_prefix": _digest(tenant), **claims})
        limit = Duration()
        limit.FromNanoseconds(int(seconds * 1e9))
        return ticket_pb2.PromptSource(address=self.address, ticket=ticket, max_time=limit)

    async def receipt(self, source: ticket_pb2.PromptSource, tenant: str = "a") -> receipt_pb2.Receipt:
        return await _receipt(self.other, tenant, prompt_source=source)


async def _receipt(runner: RunningRunner, tenant: str, **claims: Any) -> receipt_pb2.Receipt:
    call = runner.generate(messages=MESSAGES, ticket={"tenant": tenant, **claims})
    receipt: receipt_pb2.Receipt = (await events_of(call))[-1].finished.receipt
    return receipt


@asynccontextmanager
async def _pair(folder: Path, **engine: Any) -> AsyncIterator[Pair]:
    """`engine`: settings of the other runner's engine."""
    async with AsyncExitStack() as stack:
        runners = []
        for name, settings in (("holder", {}), ("other", engine)):
            (folder / name).mkdir()
            given = {"slots": 2, "context_tokens": 4096, "path": Path(__file__), **settings}
            # Processing the prompt takes longer than its transfer.
            slow = {"prefill_seconds": 0.3}
            model = fake_model("m", slow, given, slots=2, model_path=Path(__file__))
            runners.append(await stack.enter_async_context(ready_runner(folder / name, [model], stored_prompts_mb=64)))
            await runners[-1].until_state(lambda state: bool(state.state_kind))
        pair = Pair(folder, *runners)
        assert (await _receipt(pair.holder, "a")).usage.cached_prompt_tokens == 0
        await pair.holder.unload()
        await pair.holder.until_state(lambda state: state.stores_prompts)
        yield pair


async def test_stored_prompt_of_another_runner_is_restored_and_then_kept_here(tmp_path: Path) -> None:
    async with _pair(tmp_path) as pair:
        moved = await pair.receipt(pair.source())
        assert moved.usage.cached_prompt_tokens == moved.restored_prompt.token_count > 200
        assert moved.restored_prompt.source == receipt_pb2.RestoredPrompt.SOURCE_RUNNER
        stored = list((tmp_path / "other" / "r1.prompts").glob("*.prompt"))
        assert stored == [], "the state is in main memory"
        again = await pair.receipt(pair.source())
        assert again.usage.cached_prompt_tokens > 200
        assert not again.HasField("restored_prompt")
        await pair.other.unload()
        await pair.other.until_state(lambda state: state.stores_prompts)


async def test_prompt_of_another_tenant_is_not_moved(tmp_path: Path) -> None:
    async with _pair(tmp_path) as pair:
        for tenant, digest in (("b", "b"), ("c", "a")):
            source = pair.source(tenant, moved_prefix=_digest(digest))
            receipt = await pair.receipt(source, tenant)
            assert (receipt.usage.cached_prompt_tokens, receipt.HasField("restored_prompt")) == (0, False)


async def test_prompt_is_not_moved_to_an_engine_with_other_settings(tmp_path: Path) -> None:
    async with _pair(tmp_path, context_tokens=2048) as pair:
        receipt = await pair.receipt(pair.source())
        assert (receipt.usage.cached_prompt_tokens, receipt.HasField("restored_prompt")) == (0, False)


async def test_flushed_or_damaged_prompt_is_processed(tmp_path: Path) -> None:
    async with _pair(tmp_path) as pair:
        (file,) = (tmp_path / "holder" / "r1.prompts").glob("*.prompt")
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
        assert (await pair.receipt(pair.source())).usage.cached_prompt_tokens == 0
        file.unlink()
        assert (await pair.receipt(pair.source("c"), tenant="c")).usage.cached_prompt_tokens == 0


class _Holder(runner_service_pb2_grpc.RunnerServiceServicer):
    """Passes on what another runner sends, changed."""

    def __init__(self, address: str, fault: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._fault = fault

    async def FetchPrompt(  # noqa: N802 - the name of the rpc
        self, request: pb.FetchPromptRequest, context: Any
    ) -> AsyncGenerator[pb.FetchPromptResponse]:
        del context
        async for message in runner_service_pb2_grpc.RunnerServiceStub(self._channel).FetchPrompt(request):  # type: ignore[attr-defined]
            match self._fault, message.WhichOneof("kind"):
                case ("changed", "state"):
                    message.state = bytes([message.state[0] ^ 1]) + message.state[1:]
                case ("cut", "sha256") | ("too short", "state"):
                    continue
                case ("too long", "state"):
                    yield message
                case ("too late", "state"):
                    await asyncio.sleep(20)
            yield message


@pytest.mark.parametrize("fault", ["changed", "cut", "too short", "too long", "too late"])
async def test_faulty_transfer_is_discarded_and_the_prompt_processed(tmp_path: Path, fault: str) -> None:
    async with _pair(tmp_path) as pair:
        server, address = new_server(), f"unix:{tmp_path}/faulty.sock"
        holder = _Holder(pair.address, fault)  # type: ignore[abstract]  # nobody calls the other methods
        runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(holder, server)
        server.add_insecure_port(address)
        await server.start()
        source = pair.source(seconds=0.5 if fault == "too late" else 20.0)
        source.address = address
        receipt = await pair.receipt(source)
        await holder._channel.close()
        await server.stop(None)
        assert (receipt.usage.cached_prompt_tokens, receipt.HasField("restored_prompt")) == (0, False)
        assert receipt.usage.completion_tokens > 0


async def test_unreachable_holder_delays_nothing(tmp_path: Path) -> None:
    async with _pair(tmp_path) as pair:
        source = pair.source()
        source.address = f"unix:{tmp_path}/nobody.sock"
        assert (await pair.receipt(source)).usage.cached_prompt_tokens == 0


async def test_tickets_for_requests_and_for_stored_prompts_cannot_be_exchanged(tmp_path: Path) -> None:
    async with _pair(tmp_path) as pair:
        call = pair.holder.generate(ticket={"tenant": "a", "moved_prefix": 1})
        assert (await refusal(call.read())).reason is Reason.TICKET_INVALID
        request = pb.FetchPromptRequest(ticket=pair.holder.ticket(model="m", tenant="a"), state_kind="k")
        error = await refusal(pair.holder.control.FetchPrompt(request).read())
        assert error.reason is Reason.TICKET_INVALID
