"""Which of several servers calls go to, step by step."""

import pytest

from weft.kernel.address import addresses_of
from weft.kernel.failover_channel import Choice, Reach, after_call, after_news

A, B = 0, 1
START = Choice(reaches=(Reach.UNKNOWN, Reach.UNKNOWN))


def told(*news: tuple[int, Reach]) -> Choice:
    choice = START
    for index, reach in news:
        choice = after_news(choice, index, reach)
    return choice


def test_the_one_that_serves_is_chosen_wherever_it_stands() -> None:
    choice = told((A, Reach.NOT_SERVING), (B, Reach.SERVING))
    assert (choice.chosen, choice.is_sure, choice.is_settled) == (B, True, True)


def test_a_standby_that_begins_to_serve_is_chosen_although_the_frozen_owner_has_not_said_otherwise() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.NOT_SERVING), (B, Reach.SERVING))
    assert choice.chosen == B
    # The former owner goes on, and says what it is.
    assert after_news(choice, A, Reach.NOT_SERVING).chosen == B
    assert after_news(choice, A, Reach.AWAY).chosen == B


def test_an_owner_that_says_again_that_it_serves_changes_nothing() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.SERVING))
    assert after_news(choice, A, Reach.SERVING).chosen == B


def test_calls_stay_with_a_server_that_says_not_serving_while_no_other_one_serves() -> None:
    choice = told((A, Reach.SERVING), (B, Reach.NOT_SERVING), (A, Reach.NOT_SERVING))
    assert (choice.chosen, choice.is_sure) == (A, True)
    assert after_call(choice).chosen == A


def test_while_none_serves_those_that_can_be_reached_take_turns() -> None:
    choice = told((A, Reach.NOT_SERVING), (B, Reach.NOT_SERVING))
    chosen = [choice.chosen]
    for _ in range(3):
        choice = after_call(choice)
        chosen.append(choice.chosen)
    assert chosen == [A, B, A, B]
    assert after_call(told((A, Reach.NOT_SERVING), (B, Reach.AWAY))).chosen == A


def test_a_server_that_is_gone_is_left_at_once_where_another_one_serves() -> None:
    choice = Choice(reaches=(Reach.SERVING, Reach.SERVING), chosen=A, is_sure=True)
    assert after_news(choice, A, Reach.AWAY).chosen == B


def test_it_is_settled_once_one_serves_or_all_have_answered() -> None:
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
def test_addresses_have_commas_between_them(text: str, addresses: tuple[str, ...]) -> None:
    assert addresses_of(text) == addresses
