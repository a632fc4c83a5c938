"""Batches of vLLM's and SGLang's own classes, as recorded in `kv_events/`, read as block events."""

from pathlib import Path

import msgspec
import pytest

from runner_svc.backend.prefix_reports import PrefixReports
from runner_svc.policy.engine_blocks import BlockEvent, ClearedCache, RemovedBlocks, StoredBlocks
from runner_svc.runtimes import kv_events
from runner_svc.runtimes.kv_events import UntrackedCacheError, events_of, sets_flag
from runner_svc.supervise.socket_folder import SocketFolder

RECORDED = Path(__file__).with_name("kv_events")
LONG_HASH = bytes(range(32))


class _Recorded(msgspec.Struct):
    made: str
    batches: list[str]


def _events(name: str) -> list[list[BlockEvent]]:
    recorded = msgspec.json.decode((RECORDED / f"{name}.json").read_bytes(), type=_Recorded)
    return [events_of(bytes.fromhex(batch)) for batch in recorded.batches[:3]]


def _stored(*hashes: int | bytes, parent: int | bytes | None) -> StoredBlocks:
    return StoredBlocks(hashes=list(hashes), parent=parent, token_count=2, request_id="req_1")


def test_events_of_vllm_are_read() -> None:
    assert _events("vllm-0.32.0") == [
        [_stored(15_344, LONG_HASH, parent=None), _stored(2**64 - 1, parent=LONG_HASH)],
        [RemovedBlocks([LONG_HASH])],
        [ClearedCache()],
    ]


def test_vllm_with_a_second_kind_of_cache_is_not_followed() -> None:
    recorded = msgspec.json.decode((RECORDED / "vllm-0.32.0.json").read_bytes(), type=_Recorded)
    with pytest.raises(UntrackedCacheError):
        events_of(bytes.fromhex(recorded.batches[3]))


@pytest.mark.parametrize("batch", [b"\x92\x00\x91\x81\xa4type\xa1\xff", b"\x91" * 5_000], ids=["utf-8", "depth"])
async def test_batch_that_is_no_text_or_too_deep_counts_as_malformed(batch: bytes) -> None:
    """The task that follows the engine's cache died of it."""
    folder = SocketFolder("weft-test-kv-")
    events = kv_events.BlockEvents(PrefixReports(), "m", folder)
    frames = [b"", bytes(kv_events.NUMBER_BYTES), batch]
    assert [await events._take(frames) for _ in range(kv_events.MAX_MALFORMED)][-2:] == [
        None,
        "their format is unknown",
    ]
    folder.remove()


def test_events_of_sglang_are_read() -> None:
    first = -8_203_118_713_452
    assert _events("sglang-0.5.23") == [
        [_stored(first, 77, parent=None), _stored(2**63 - 1, parent=77)],
        [RemovedBlocks([77, 2**63 - 1])],
        [ClearedCache()],
    ]


def test_many_blocks_are_read_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_TURN_BLOCKS", 4)
    event = {"type": "BlockStored", "block_hashes": list(range(10)), "parent_block_hash": 99, "block_size": 2}
    events = events_of(msgspec.msgpack.encode([0.0, [event, {"type": "BlockRemoved", "block_hashes": [1, 2]}]]))
    stored = [(each.parent, list(each.hashes)) for each in events if isinstance(each, StoredBlocks)]
    assert stored == [(99, [0, 1, 2, 3]), (3, [4, 5, 6, 7]), (7, [8, 9])]
    assert [len(turn) for turn in kv_events._turns(events)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tp", "2"], False),
        (["--kv-events-config", "{}"], True),
        (["--kv-events-config={}"], True),
        (["-dp", "2"], True),
        (["--dp-size=2"], True),
    ],
)
def test_command_line_that_publishes_elsewhere_or_for_several_engines_is_left_alone(
    arguments: list[str], expected: bool
) -> None:
    assert sets_flag(arguments) is expected
