"""Where prompts were placed, as a dispatcher tells it a router that leads since a moment ago."""

from router_svc.placement import _request_from_proto
from weft.dispatch.prefix_holders import MAX_PREFIX_HOLDERS, PrefixHolders
from weft.dispatch.remote_router import _open_to_proto
from weft.kernel.requests.placement_request import PlacementRequest, PrefixHolder
from weft.kernel.requests.request_values import Operation

FIRST, SECOND = PrefixHolder("m", "a", "1", 2), PrefixHolder("m", "b", "1", 4)


def test_a_prompt_finds_the_endpoint_of_the_longest_prompt_that_it_continues() -> None:
    holders = PrefixHolders()
    holders.note((1, 2), FIRST)
    holders.note((1, 2, 3, 4), SECOND)
    assert holders.find((1, 2, 3, 4, 5)) == SECOND
    assert holders.find((1, 2, 3)) == FIRST
    assert holders.find((1,)) is None
    assert holders.find(()) is None


def test_prompts_are_remembered_up_to_a_bound() -> None:
    holders = PrefixHolders()
    holders.note((), FIRST)
    assert len(holders) == 0
    for digest in range(MAX_PREFIX_HOLDERS + 5):
        holders.note((digest,), FIRST)
    assert len(holders) == MAX_PREFIX_HOLDERS
    assert holders.find((4,)) is None


def test_a_router_gets_the_holder_unless_it_does_not_go_with_the_digests() -> None:
    request = PlacementRequest(
        request_id="r", tenant="t", model="m", operation=Operation.CHAT, prefix_digests=(1, 2, 3), prefix_holder=FIRST
    )
    opened = _open_to_proto(request)
    assert _request_from_proto(opened, "").prefix_holder == FIRST
    opened.prefix_holder.digest_count = 4
    assert _request_from_proto(opened, "").prefix_holder is None
