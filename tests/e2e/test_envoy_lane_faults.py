"""Faults of the lane over real processes and a real Envoy: what callers, engines and records have afterwards.

One mesh for all of them, as processes of its own: each test leaves it as it was.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lane_mesh import SECONDS, Lane, LaneApart, lane_apart, lane_runner
from mesh_process import eventually

SLOTS = 2
PER_SECOND = 40.0
LONG = 1_000
"""Tokens of a stream that lasts until its engine hurries."""
DRAIN_SECONDS = 4.0
STREAMS = 1_000
IDLE_PER_SECOND, IDLE_TOKENS = 0.5, 60
"""A stream of two minutes, unless its engine hurries."""
MANY, CROWD = "many", "crowd"
DIRECT, DIRECT_POOL = "direct", "engines"
"""The runner of an engine that the proxy calls itself, and its pool."""
IDLE, IDLE_POOL = "idle", "waiters"
"""The runner of such an engine that has room for all of `STREAMS`, and its pool."""
KINDS = ("slow", DIRECT)
"""A runner of each kind of endpoint; the first one's pool is the default of the lane."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaneApart]:
    slow = lane_runner("slow", slots=SLOTS, answer_tokens=0, tokens_per_second=PER_SECOND)
    # The first one is small and the second one is not: a request goes to either.
    one, many = lane_runner("one", pool=MANY, slots=1), lane_runner(CROWD, pool=MANY, slots=STREAMS)
    direct = lane_runner(DIRECT, pool=DIRECT_POOL, slots=SLOTS, answer_tokens=0, tokens_per_second=PER_SECOND)
    direct["models"][0] |= {"lane": "engine", "context_tokens": 1_000_000}
    slow["models"][0] |= {"context_tokens": 1_000_000}
    idle = lane_runner(IDLE, pool=IDLE_POOL, slots=STREAMS, answer_tokens=0)
    idle["models"][0] |= {"lane": "engine"}
    folder = tmp_path_factory.mktemp("faults")
    with lane_apart(folder, slow, direct, one, many, idle, drain_seconds=DRAIN_SECONDS) as world:
        yield world


@pytest.fixture
async def lane(world: LaneApart) -> AsyncIterator[Lane]:
    async with world.lane() as lane:
        yield lane


def counted(tokens: int) -> tuple[str, bool]:
    """A whole answer of so many tokens, with its first one."""
    return " ".join(f"tok{number}" for number in range(tokens)), True


async def running(lane: Lane, *tokens: int, **fields: Any) -> tuple[list[str], "list[asyncio.Task[tuple[str, bool]]]"]:
    """Streams of so many tokens that have begun: their ids, and what becomes of them."""
    ids = [lane.new_id() for _ in tokens]
    return ids, [
        await lane.begun(lane.body(max_tokens=each, **fields), name) for name, each in zip(ids, tokens, strict=True)
    ]


async def queued(lane: Lane, **fields: Any) -> tuple[str, "asyncio.Task[tuple[int, Any, Any]]"]:
    """A request that waits behind those."""
    name = lane.new_id()
    task = asyncio.create_task(lane.ask(lane.body(max_tokens=1, **fields), name))

    async def waits() -> bool:
        return (await lane.shown(name)).get("state") == "queued"

    await eventually(waits, SECONDS, "the request does not wait")
    return name, task


def to(runner: str) -> dict[str, str]:
    """The field of a request that has it placed on a runner of `KINDS`."""
    return {"model": DIRECT_POOL} if runner == DIRECT else {}


@asynccontextmanager
async def hurried(world: LaneApart, runner: str = "slow") -> AsyncIterator[None]:
    """Streams under way end at once, those of the length of the block too."""
    async with await world.engine(runner) as engine:
        await engine.set_behaviour(hurries=True)
        yield
        await engine.set_behaviour(hurries=False)


def require_whole(records: Sequence[dict[str, Any]], *tokens: int, runner: str = "slow") -> None:
    """Each record is that of a complete answer of so many tokens, and no witness contradicts another."""
    for record, expected in zip(records, tokens, strict=True):
        receipt = record["receipt"]
        assert (receipt["outcome"], receipt["completionTokens"]) == ("completed", expected), record
        assert [each["runner"] for each in receipt["attempts"]] == [runner]
        assert (receipt["proxy"]["status"], receipt["proxy"]["disagreements"]) == (200, [])
        assert record["tenant"] == "default"


async def test_requests_at_a_picker_that_is_killed_end_whole_with_receipts_and_their_slots_are_not_given_away(
    world: LaneApart, lane: Lane
) -> None:
    ids, streams = await running(lane, LONG, LONG)
    waits, waiting = await queued(lane)
    await asyncio.sleep(0.5)  # until the database knows of all three
    await world.end("picker", signal.SIGKILL)
    status, answer, headers = await waiting
    assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "service_unavailable", "1")
    await world.start("picker")
    # Both slots are taken by requests that the new picker has not placed: what comes now waits for them.
    after = [await queued(lane) for _ in range(4)]
    assert not any(each.done() for each in streams), "both run on over the restart"
    async with hurried(world):
        assert [(await task)[0] for _, task in after] == [200] * 4
        assert [await each for each in streams] == [counted(LONG)] * 2
    require_whole([await lane.record(each) for each in ids], LONG, LONG)
    require_whole([await lane.record(each) for each, _ in after], 1, 1, 1, 1)
    lost = await lane.shown(waits)
    assert (lost["state"], lost["reason"], "receipt" in lost) == ("ended", "router_lost", False)


async def test_a_request_whose_runner_is_killed_while_its_picker_is_away_has_the_proxys_word_and_no_usage(
    world: LaneApart, lane: Lane
) -> None:
    """The negative control of the test above, too: where nothing reports an answer, no record claims one."""
    (name,), (stream,) = await running(lane, LONG)
    await asyncio.sleep(0.5)
    await world.end("picker", signal.SIGKILL)
    await world.end("slow", signal.SIGKILL)
    text, is_whole = await stream
    assert (text.startswith("tok0"), is_whole) == (True, False)
    await world.start("picker")
    record = await lane.record(name)
    assert (record["receipt"]["outcome"], record["reason"]) == ("failed", "worker_lost"), record
    assert record["receipt"]["proxy"]["flags"]
    assert "completionTokens" not in record["receipt"]
    await world.start("slow")
    await world.until_placed(lane)


@pytest.mark.parametrize("runner", KINDS)
async def test_a_frozen_picker_stops_no_stream_and_loses_no_request(world: LaneApart, lane: Lane, runner: str) -> None:
    ids, streams = await running(lane, LONG, LONG, **to(runner))
    waits, waiting = await queued(lane, **to(runner))
    with world.frozen_picker():
        async with hurried(world, runner):
            assert [await each for each in streams] == [counted(LONG)] * 2
        during = lane.new_id()
        asked = asyncio.create_task(lane.ask(lane.body(max_tokens=1, **to(runner)), during))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert not asked.done()
    assert [(await each)[0] for each in (waiting, asked)] == [200, 200]
    require_whole([await lane.record(each) for each in (*ids, waits, during)], LONG, LONG, 1, 1, runner=runner)


@pytest.mark.parametrize("runner", KINDS)
async def test_a_picker_that_is_stopped_lets_requests_end_and_its_successor_hears_of_the_longer_ones(
    world: LaneApart, lane: Lane, runner: str
) -> None:
    ids, streams = await running(lane, 100, LONG, **to(runner))
    waits, waiting = await queued(lane, **to(runner))
    await world.end("picker", signal.SIGTERM)
    assert not streams[1].done(), "it is longer than the picker waits"
    await world.start("picker")
    async with hurried(world, runner):
        assert [await each for each in streams] == [counted(100), counted(LONG)]
    assert (await waiting)[0] == 200
    # Ended by the old picker: its last lines of the proxy's log may come after it has stopped.
    ended = [await lane.record(each, with_proxy=False) for each in (ids[0], waits)]
    assert [each["receipt"]["outcome"] for each in ended] == ["completed"] * 2

    async def known() -> dict[str, Any] | None:
        record = await lane.record(ids[1])
        return record if record["receipt"]["outcome"] == "completed" else None

    require_whole([await eventually(known, SECONDS, "the successor does not hear of it")], LONG, runner=runner)


async def test_a_caller_that_leaves_the_queue_has_cancelled_and_is_placed_no_more(world: LaneApart, lane: Lane) -> None:
    _, streams = await running(lane, LONG, LONG)
    leaves, leaving = await queued(lane)
    stays, staying = await queued(lane)
    leaving.cancel()
    record = await lane.record(leaves, with_proxy=False)
    assert (record["receipt"]["outcome"], record["receipt"]["attempts"]) == ("cancelled", [])
    async with hurried(world):
        assert (await staying)[0] == 200
        assert [await each for each in streams] == [counted(LONG)] * 2
    require_whole([await lane.record(stays)], 1)


@pytest.mark.parametrize("runner", KINDS)
async def test_a_caller_that_leaves_in_mid_answer_has_cancelled_and_its_slot_is_free(
    world: LaneApart, lane: Lane, runner: str
) -> None:
    names = [lane.new_id() for _ in range(SLOTS)]
    for name in names:
        async with lane.asking(lane.body(stream=True, max_tokens=LONG, **to(runner)), name) as response:
            await response.content.readline()
            response.close()
    for name in names:
        receipt = (await lane.record(name))["receipt"]
        assert (receipt["outcome"], receipt["attempts"][0]["reason"]) == ("cancelled", "cancelled"), receipt
        assert [each["runner"] for each in receipt["attempts"]] == [runner]
    assert (await lane.ask(lane.body(max_tokens=1, **to(runner)), lane.new_id()))[0] == 200
    async with await world.engine(runner) as engine:
        await engine.wait_for_state(lambda state: state.busy_slots == 0)


@pytest.mark.parametrize("runner", KINDS)
async def test_a_body_of_1_2_mb_reaches_the_engine_whole(lane: Lane, runner: str) -> None:
    used: list[int] = []
    for more in ("", " one two"):
        name = lane.new_id()
        body = lane.body("x" * 1_200_000 + more, max_tokens=1, **to(runner))
        status, text = await lane.ask_in_pieces(body, name)
        assert status == 200, text
        receipt = (await lane.record(name))["receipt"]
        assert (receipt["outcome"], receipt["proxy"]["disagreements"]) == ("completed", [])
        used.append(receipt["promptTokens"])
    # Its end counts, too.
    assert used[1] == used[0] + 2


async def test_an_answer_of_an_engine_itself_goes_on_while_its_picker_is_killed_and_the_log_may_tell_of_it(
    world: LaneApart, lane: Lane
) -> None:
    name = lane.new_id()
    stream = await lane.begun(lane.body(max_tokens=LONG, **to(DIRECT)), name)
    await asyncio.sleep(0.5)  # until the database knows of it
    await world.end("picker", signal.SIGKILL)
    async with hurried(world, DIRECT):
        assert await stream == counted(LONG)
    await world.start("picker")

    async def ended() -> dict[str, Any] | None:
        found = await lane.shown(name)
        return found if found.get("state") == "ended" else None

    record = await eventually(ended, SECONDS, "nothing is known of its end")
    # No runner reports it, and of its log Envoy keeps the last few entries: what is not known is not claimed.
    if "receipt" not in record:
        assert record["reason"] == "router_lost", record
    else:
        receipt = record["receipt"]
        assert (receipt["outcome"], receipt["completionTokens"], receipt["proxy"]["status"]) == ("completed", LONG, 200)
    assert (await lane.ask(lane.body(max_tokens=1, **to(DIRECT)), lane.new_id()))[0] == 200


async def test_an_engine_that_ends_its_bytes_cleanly_in_mid_answer_is_an_error_of_the_stream_and_of_the_receipt(
    world: LaneApart, lane: Lane
) -> None:
    async with await world.engine("slow") as engine:
        await engine.set_behaviour(end_without_finish_reason=True, answer_tokens=3)
        name = lane.new_id()
        text, is_whole = await lane.stream_text(lane.body(max_tokens=50), name)
        await engine.set_behaviour(end_without_finish_reason=False, answer_tokens=0)
    assert (text.split()[:1], is_whole) == (["tok0"], False)
    record = await lane.record(name)
    assert record["receipt"]["outcome"] == "failed", record
    assert record["receipt"]["proxy"]["status"] == 200
    assert await lane.stream_text(lane.body(max_tokens=5), lane.new_id()) == counted(5)


async def test_an_engine_that_is_killed_before_its_first_token_is_an_attempt_and_the_next_runner_answers(
    world: LaneApart, lane: Lane
) -> None:
    async with await world.engine("one") as engine:
        await engine.set_behaviour(crash_after_tokens=0)
        status, name = await lane.placed_on("one", lane.body(max_tokens=4) | {"model": MANY})
    assert status == 200
    receipt = (await lane.record(name))["receipt"]
    assert (receipt["outcome"], receipt["completionTokens"]) == ("completed", 4)
    assert [each["runner"] for each in receipt["attempts"]] == ["one", CROWD]

    async def has_its_report() -> bool:
        return bool((await lane.record(name))["receipt"]["attempts"][0]["reason"] == "server_died")

    # The report of the runner that failed may come after that of the one that answered.
    await eventually(has_its_report, SECONDS, "the receipt does not say that the engine died")


async def test_a_stream_of_an_engine_itself_that_ends_after_the_restart_of_its_picker_has_its_receipt(
    world: LaneApart, lane: Lane
) -> None:
    """The proxy's log, which alone tells of it, reaches the next picker; its permit was lost with the old one."""
    ids, streams = await running(lane, LONG, LONG, **to(DIRECT))
    waits, waiting = await queued(lane, **to(DIRECT))
    await asyncio.sleep(0.5)  # until the database knows of all three
    await world.end("picker", signal.SIGKILL)
    assert (await waiting)[0] == 503
    await world.start("picker")

    async def is_lost() -> bool:
        found = [await lane.shown(each) for each in (*ids, waits)]
        return [each.get("reason") for each in found] == ["router_lost"] * 3

    await eventually(is_lost, SECONDS, "the records of a killed picker do not say so")
    for each in ids:
        assert "receipt" not in await lane.shown(each), "nothing is claimed of what goes on"
    assert not any(each.done() for each in streams), "both run on over the restart"
    async with hurried(world, DIRECT):
        assert [await each for each in streams] == [counted(LONG)] * 2
    require_whole([await lane.record(each) for each in ids], LONG, LONG, runner=DIRECT)
    lost = await lane.shown(waits)
    assert (lost["reason"], "receipt" in lost) == ("router_lost", False)


@pytest.mark.heavy
async def test_a_thousand_idle_streams_of_an_engine_itself_lose_no_token_and_each_has_a_receipt(
    world: LaneApart, lane: Lane
) -> None:
    ids, body = [lane.new_id() for _ in range(STREAMS)], lane.body(max_tokens=IDLE_TOKENS) | {"model": IDLE_POOL}
    async with await world.engine(IDLE) as engine:
        await engine.set_behaviour(tokens_per_second=IDLE_PER_SECOND)
        streams = await asyncio.gather(*(lane.begun(body, each) for each in ids))
        await engine.set_behaviour(tokens_per_second=0.0)
    assert not any(each.done() for each in streams), "all of them are there at once"
    assert (await lane.ask(lane.body(max_tokens=1, **to(DIRECT)), lane.new_id()))[0] == 200
    async with hurried(world, IDLE):
        answers = await asyncio.gather(*streams)
    assert [answer for answer in answers if answer != counted(IDLE_TOKENS)] == []
    require_whole([await lane.record(each) for each in ids], *[IDLE_TOKENS] * STREAMS, runner=IDLE)


@pytest.mark.heavy
async def test_of_a_thousand_streams_at_once_none_loses_its_first_token_and_each_has_a_receipt(lane: Lane) -> None:
    ids = [lane.new_id() for _ in range(STREAMS)]
    body = lane.body(max_tokens=8) | {"model": MANY}
    answers = await asyncio.gather(*(lane.stream_text(body, each) for each in ids))
    assert [answer for answer in answers if answer != counted(8)] == []
    for name in ids:
        # Who reads so many is slow: some end at the proxy long after their runner, when its log is waited for no more.
        receipt = (await lane.record(name, with_proxy=False))["receipt"]
        assert (receipt["outcome"], receipt.get("completionTokens")) == ("completed", 8), receipt
        assert not receipt.get("proxy", {}).get("disagreements")
