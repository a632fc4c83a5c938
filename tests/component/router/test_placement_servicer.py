"""Requests that PlacementService refuses, and that they leave nothing behind."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from kit.serving import served

from router_svc.placement import MAX_ATTEMPTS_USED, MAX_NEEDED_TOOLS, PlacementServicer, add_placement_to_server
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.dispatch.remote_router import PLACE, REPORT_END
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft_testing.carried import CarriedStub

PLACED = WeftError(Reason.QUEUE_FULL, "it came to be placed")


class NobodyIsPlaced:
    """A router that records the requests and refuses them."""

    def __init__(self) -> None:
        self.asked: list[PlacementRequest] = []

    def place(self, request: PlacementRequest) -> Any:
        self.asked.append(request)
        raise PLACED

    async def quote(self, request: PlacementRequest) -> Any:
        raise AssertionError(f"{request.request_id} asks for no quote")

    async def queues(self) -> list[PoolQueue]:
        return []

    async def report_end(self, request: PlacementRequest, receipt: Any) -> bool:
        raise AssertionError(f"{request.request_id} has not ended: {receipt}")


async def _placed(folder: Path, **fields: Any) -> tuple[WeftError, list[PlacementRequest]]:
    router = NobodyIsPlaced()
    opening = {"request_id": "r", "tenant": "t", "model": "m", "operation": model_pb2.MODEL_OPERATION_CHAT, **fields}
    add = add_placement_to_server
    async with served(folder / "router.sock", (add, PlacementServicer(router))) as channel:
        call = CarriedStub(channel, pb).Place(pb.PlaceRequest(open=pb.PlaceOpen(**opening)))
        with pytest.raises(WeftError) as refused:
            await call.read()
    return refused.value, router.asked


async def test_separate_grpc_call_of_a_placement_is_unimplemented(tmp_path: Path) -> None:
    servicer = PlacementServicer(NobodyIsPlaced())
    async with served(tmp_path / "router.sock", (add_placement_to_server, servicer)) as channel:
        for rpc in (PLACE, REPORT_END):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.stream_stream(rpc.path)(timeout=1).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"priority": priority_pb2.PRIORITY_SYSTEM}, "open.priority"),
        ({"priority": priority_pb2.PRIORITY_DURABLE}, "open.priority"),
        ({"attempts_used": MAX_ATTEMPTS_USED + 1}, "open.attempts_used"),
        ({"attempts_used": 2**31 - 1}, "open.attempts_used"),
        ({"attempts_used": -1}, "open.attempts_used"),
        ({"age": Duration(seconds=100_000_000_000)}, "open.age"),
        ({"age": Duration(seconds=-1)}, "open.age"),
        ({"needed_tools": ["x" * 100_000]}, "open.needed_tools[0]"),
        ({"needed_tools": ["web", "a\nb"]}, "open.needed_tools[1]"),
        ({"needed_tools": ["t"] * (MAX_NEEDED_TOOLS + 1)}, "open.needed_tools"),
        ({"client_id": "a\r\nb"}, "open.client_id"),
        ({"work": -1.0}, "open.work"),
        ({"work": 1e10}, "open.work"),
        ({"work": float("nan")}, "open.work"),
        ({"work": float("inf")}, "open.work"),
    ],
)
async def test_invalid_request_is_rejected_by_field_before_placement(
    tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    error, asked = await _placed(tmp_path, **fields)
    assert (error.reason, error.metadata["field"], asked) == (Reason.INVALID_ARGUMENT, field, [])


async def test_request_at_every_limit_is_placed(tmp_path: Path) -> None:
    error, asked = await _placed(
        tmp_path,
        priority=priority_pb2.PRIORITY_HIGH,
        attempts_used=MAX_ATTEMPTS_USED,
        age=Duration(seconds=604_800),
        needed_tools=[f"tool-{number}" for number in range(MAX_NEEDED_TOOLS)],
    )
    assert error.reason is PLACED.reason
    assert (asked[0].attempts_used, asked[0].age_seconds) == (MAX_ATTEMPTS_USED, 604_800.0)


@pytest.mark.parametrize(
    ("number", "thinking"),
    [(0, ThinkingMode.DEFAULT), (2, ThinkingMode.ENABLED), (3, ThinkingMode.DISABLED), (99, ThinkingMode.DEFAULT)],
)
async def test_thinking_mode_is_passed_and_an_unknown_mode_is_ignored(
    number: int, thinking: ThinkingMode, tmp_path: Path
) -> None:
    error, asked = await _placed(tmp_path, needed_thinking=number)
    assert error.reason is PLACED.reason
    assert asked[0].thinking is thinking
