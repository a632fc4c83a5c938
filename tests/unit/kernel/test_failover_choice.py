"""Which of several servers calls go to, step by step."""

import pytest

from weft.kernel.channels.failover_channel import Choice, Reach, after_call, after_news
from weft.kernel.values.address import addresses_of

A, B = 0, 1
START = Choice(reaches=(Reach.UNKNOWN, Reach.UNKNOWN))


def told(*news: tuple[int, Reach]) -> Choice:
    choice = START
    for index, reach in news:
        choice = after_news(choice, index, reach)
    return choice


def test_serving_address_is_chosen_at_any_position() -> None:
    choice = told((A, Reach.NOT_SERVING), (B, Reach.SERVING))
    assert (choice.chosen, choice.is_sure, choice.is_settled) == (B, True, True)


def test_standby_that_starts_serving_is_chosen_over_a_frozen_owner() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.NOT_SERVING), (B, Reach.SERVING))
    assert choice.chosen == B
    # The former owner goes on, and says what it is.
    assert after_news(choice, A, Reach.NOT_SERVING).chosen == B
    assert after_news(choice, A, Reach.AWAY).chosen == B


def test_repeated_serving_report_of_an_owner_changes_nothing() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.SERVING))
    assert after_news(choice, A, Reach.SERVING).chosen == B


def test_calls_stay_with_a_non_serving_server_if_no_other_serves() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.NOT_SERVING), (A, Reach.NOT_SERVING))
    assert (choice.chosen, choice.is_sure) == (A, True)
    assert after_call(choice).chosen == A


def test_reachable_servers_are_tried_in_turn_if_none_serves() -> None:
    choice = told((A, Reach.NOT_SERVING), (B, Reach.NOT_SERVING))
    chosen = [choice.chosen]
    for _ in range(3):
        choice = after_call(choice)
        chosen.append(choice.chosen)
    assert chosen == [A, B, A, B]
    assert after_call(told((A, Reach.NOT_SERVING), (B, Reach.AWAY))).chosen == A


def test_unreachable_server_is_left_immediately_if_another_serves() -> None:
    choice = Choice(reaches=(Reach.SERVING, Reach.SERVING), chosen=A, is_sure=True)
    assert after_news(choice, A, Reach.AWAY).chosen == B


def test_choice_is_settled_once_one_serves_or_all_have_responded() -> None:
    assert not START.is_settled
    assert not told((A, Reach.NOT_SERVING)).is_settled
    assert told((A, Reach.NOT_SERVING), (B, Reach.AWAY)).is_settled
    assert told((B, Reach.SERVING)).is_settled


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:7070", ("127.0.0.1:7070",)),
        ("a.example:7070, tls:b.example:7070,", ("a.example:7070", "tls:b.example:7070")),
        ("unix:/one.sock,unix:/two.sock", ("unix:/one.sock", "unix:/two.sock")),
        ("unix:/homes/a,b/run/registry.sock", ("unix:/homes/a,b/run/registry.sock",)),
    ],
)
def test_addresses_are_comma_separated(text: str, addresses: tuple[str, ...]) -> None:
    assert addresses_of(text) == addresses
