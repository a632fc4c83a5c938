"""What several routers answer, as one answer of the mesh."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from router_svc.merged_records import (
    merged_clients,
    merged_figures,
    merged_queues,
    merged_requests,
    newest_record,
    steps_from,
)
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_pb2 import ClientRecord, RequestRecord
from weft.dispatch.placement import PoolQueue
from weft.kernel.reasons import Reason

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
STEP_SECONDS = 10


def record(
    request_id: str, *, arrived: float, ended: float | None = None, reason: Reason = Reason.UNSPECIFIED
) -> RequestRecord:
    made = RequestRecord(request_id=request_id, tenant="t", state=RequestRecord.STATE_QUEUED)
    made.arrive_time.FromDatetime(NOON + timedelta(seconds=arrived))
    if ended is not None:
        made.state = RequestRecord.STATE_ENDED
        made.end_time.FromDatetime(NOON + timedelta(seconds=ended))
        made.reason = reason.value  # type: ignore[assignment]  # same numbers
    return made


def figures(*, begin: float, completed: list[int], p95: list[float] | None = None, models: str = "m") -> Figures:
    made = Figures(step_count=len(completed), waiting=completed, running=completed)
    made.step.FromSeconds(STEP_SECONDS)
    made.start_time.FromDatetime(NOON + timedelta(seconds=begin))
    for requests in (made.all, made.models.add(model=models).requests):
        for name in ("completed", "failed", "rejected", "cancelled", "prompt_tokens"):
            getattr(requests, name).extend(completed)
        requests.cached_prompt_tokens.extend(completed)
        requests.completion_tokens.extend(completed)
        for times in (requests.time_to_first_token, requests.time_per_output_token):
            times.p50.extend(p95 or [math.nan] * len(completed))
            times.p95.extend(p95 or [math.nan] * len(completed))
            if p95:
                times.total_p95 = max(p95)
    return made


def test_a_request_that_moved_is_what_its_new_owner_knows_of_it() -> None:
    moved = record("a", arrived=0, ended=9, reason=Reason.MOVED)
    going_on = record("a", arrived=0)
    assert newest_record([moved, going_on]) is going_on
    assert newest_record([going_on, moved]) is going_on
    # The new owner is lost: what the former one remembers is better than nothing.
    assert newest_record([moved]) is moved
    assert newest_record([]) is None


def test_a_request_that_another_router_goes_on_with_is_not_lost() -> None:
    lost, other = record("r", arrived=0, ended=1, reason=Reason.ROUTER_LOST), record("r", arrived=0)
    done = record("r", arrived=0, ended=0.5)
    for known in (other, done):
        assert newest_record([lost, known]) is known
        assert merged_requests([[lost], [known]], 10) == [known]
    # Negative controls: alone it is what is known, and another tenant's is another request.
    assert newest_record([lost]) is lost
    foreign = record("r", arrived=0)
    foreign.tenant = "another"
    assert merged_requests([[lost], [foreign]], 10) == [foreign, lost]


def test_a_record_of_how_a_request_ended_hides_that_its_dispatcher_left_a_router_that_was_frozen() -> None:
    left, done = record("r", arrived=0.1, ended=9, reason=Reason.CANCELLED), record("r", arrived=0, ended=5)
    assert newest_record([left, done]) is done
    assert merged_requests([[left], [done]], 10) == [done]
    # Negative control: who cancelled it is known.
    left.cancelled_by = "key:k"
    assert newest_record([left, done]) is left
    assert merged_requests([[left], [done]], 10) == [left, done]


def test_of_two_ended_requests_with_one_id_the_later_one_is_known() -> None:
    first, second = record("a", arrived=0, ended=5), record("a", arrived=6, ended=7)
    assert newest_record([second, first]) is second


def test_lists_are_joined_in_their_order_and_moved_requests_are_hidden() -> None:
    here = [record("b", arrived=2), record("y", arrived=0, ended=3)]
    there = [
        record("a", arrived=1),
        record("z", arrived=0, ended=4),
        record("b", arrived=2, ended=5, reason=Reason.MOVED),
    ]
    assert [each.request_id for each in merged_requests([here, there], 10)] == ["a", "b", "z", "y"]
    assert [each.request_id for each in merged_requests([here, there], 3)] == ["a", "b", "z"]


def test_counts_of_a_client_are_added_and_its_targets_too() -> None:
    here = ClientRecord(client_id="c", request_count=2, token_count=10, running_count=1, route="old")
    here.last_seen_time.FromDatetime(NOON)
    here.first_seen_time.FromDatetime(NOON - timedelta(hours=1))
    here.targets.add(target="m", request_count=2)
    there = ClientRecord(client_id="c", request_count=3, token_count=5, refused_count=1, route="new")
    there.last_seen_time.FromDatetime(NOON + timedelta(seconds=1))
    there.first_seen_time.FromDatetime(NOON)
    there.device_time.FromSeconds(4)
    there.targets.add(target="n", request_count=3)
    there.targets.add(target="m", request_count=2)
    (merged,) = merged_clients([[here], [there]])
    assert (merged.request_count, merged.token_count, merged.refused_count, merged.running_count) == (5, 15, 1, 1)
    assert (merged.route, merged.device_time.seconds) == ("new", 4)
    assert merged.first_seen_time.ToDatetime(UTC) == NOON - timedelta(hours=1)
    assert [(each.target, each.request_count) for each in merged.targets] == [("m", 4), ("n", 3)]


def test_a_client_of_one_router_alone_is_left_as_it_is() -> None:
    client = ClientRecord(client_id="c", request_count=2)
    assert list(merged_clients([[client], []])) == [client]


def test_the_load_of_a_pool_is_that_at_all_routers() -> None:
    here = PoolQueue(pool="p", waiting=1, max_waiting=10, running=2)
    there = PoolQueue(pool="p", waiting=3, max_waiting=10, running=1, average_wait_seconds=0.5)
    other = PoolQueue(pool="a", waiting=0, max_waiting=10, running=0)
    assert merged_queues([[here], [there, other]]) == [
        other,
        PoolQueue(pool="p", waiting=4, max_waiting=10, running=3, average_wait_seconds=0.5),
    ]


def test_steps_of_two_routers_are_added_where_they_overlap() -> None:
    # The second router began two steps later, and its steps begin three seconds off.
    merged = merged_figures([figures(begin=0, completed=[1, 2, 3, 4]), figures(begin=23, completed=[10, 20])])
    assert list(merged.all.completed) == [1, 2, 13, 24]
    assert list(merged.waiting) == [1, 2, 13, 24]
    assert merged.step_count == 4
    assert merged.start_time.ToDatetime(UTC) == NOON


def test_a_step_that_one_router_has_not_ended_is_not_shown_yet() -> None:
    merged = merged_figures([figures(begin=0, completed=[1, 2, 3]), figures(begin=0, completed=[10, 20])])
    assert list(merged.all.completed) == [11, 22]


def test_of_percentiles_the_greatest_is_shown_and_unknown_ones_stay_unknown() -> None:
    here = figures(begin=0, completed=[1, 1], p95=[0.5, math.nan])
    there = figures(begin=0, completed=[1, 1], p95=[0.2, math.nan])
    merged = merged_figures([there, here]).all.time_to_first_token
    assert merged.p95[0] == 0.5
    assert math.isnan(merged.p95[1])
    assert not merged.HasField("total_p50")


def test_models_are_shown_by_their_requests_at_all_routers() -> None:
    merged = merged_figures([figures(begin=0, completed=[1], models="a"), figures(begin=0, completed=[9], models="b")])
    assert [model.model for model in merged.models] == ["b", "a"]
    assert list(merged.models[0].requests.completed) == [9]


def test_a_router_with_steps_of_another_length_is_left_out() -> None:
    other = figures(begin=0, completed=[7])
    other.step.FromSeconds(60)
    assert list(merged_figures([figures(begin=0, completed=[1]), other]).all.completed) == [1]


def test_the_figures_of_one_router_are_as_it_gave_them() -> None:
    alone = figures(begin=3, completed=[1])
    assert merged_figures([alone]) is alone


@pytest.mark.parametrize(("begin", "left"), [(0, [1, 2, 3]), (10, [2, 3]), (30, []), (90, []), (-50, [1, 2, 3])])
def test_a_reader_is_given_the_steps_that_it_has_not_read(begin: int, left: list[int]) -> None:
    whole = figures(begin=0, completed=[1, 2, 3], p95=[0.1, 0.2, 0.3])
    cut = steps_from(whole, whole.start_time.ToNanoseconds() + begin * 1_000_000_000)
    assert list(cut.all.completed) == left
    assert list(cut.models[0].requests.completed) == left
    assert len(cut.all.time_to_first_token.p95) == len(left) == cut.step_count
    assert list(whole.all.completed) == [1, 2, 3]
