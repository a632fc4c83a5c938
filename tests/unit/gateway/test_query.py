"""Query parameters of an endpoint: unknown, repeated and invalid ones are refused by name."""

import pytest

from gateway.intake.query import Query
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

KNOWN = frozenset({"limit", "token", "order", "flag"})


def query(text: str, known: frozenset[str] | None = KNOWN) -> Query:
    return Query({"query_string": text.encode()}, known)


def refused(text: str) -> str:
    with pytest.raises(FieldError) as error:
        query(text).count("limit", 1000)
    assert error.value.reason is Reason.INVALID_ARGUMENT
    return error.value.field


@pytest.mark.parametrize(
    "text", ["0", "-1", "1001", "1e3", "1.5", "x", "", "+1", "0x1", "9" * 400, "%D9%A1", "%EF%BC%91"]
)
def test_count_is_a_whole_number_in_its_range(text: str) -> None:
    assert refused(f"limit={text}") == "limit"


def test_leading_zeros_count_as_digits_only_where_told() -> None:
    assert query("limit=000001000").count("limit", 1000) == 1000
    assert refused("limit=0000001000") == "limit"
    with pytest.raises(FieldError):
        query("limit=00010").count("limit", 1000, padded=False)


def test_absent_parameters_have_defaults() -> None:
    empty = query("")
    assert (empty.count("limit", 5), empty.text("token"), empty.token("token")) == (0, "", "")
    assert (empty.flag("flag"), empty.is_ascending(), "limit" in empty) == (False, False, False)


def test_flags_and_orders_are_words() -> None:
    assert [query(f"flag={word}").flag("flag") for word in ("1", "true", "0", "false")] == [True, True, False, False]
    assert [query(f"order={word}").is_ascending() for word in ("asc", "desc")] == [True, False]
    for text in ("flag=yes", "flag=True", "flag="):
        with pytest.raises(FieldError):
            query(text).flag("flag")
    with pytest.raises(FieldError):
        query("order=up").is_ascending()


def test_unknown_repeated_and_oversized_parameters_are_refused_by_name() -> None:
    assert refused("Limit=1") == "Limit"
    assert refused("limit=1&limit=2") == "limit"
    assert refused("token=" + "x" * 1025) == "token"
    assert refused("x" * 500 + "=1") == "x" * 64
    assert query("token=" + "x" * 1024).text("token") == "x" * 1024


def test_nul_is_refused_by_name() -> None:
    """PostgreSQL cannot compare it: filters of tasks were answered with 503."""
    assert refused("token=a%00b") == "token"


def test_handler_may_ignore_unknown_parameters() -> None:
    assert query("beta=true&limit=1&limit=2", None).count("limit", 5) == 2


@pytest.mark.parametrize("text", ["token=%ff", "&".join(f"a{index}=1" for index in range(17)), "token=\xff"])
def test_malformed_query_is_refused(text: str) -> None:
    with pytest.raises(WeftError) as error:
        query(text)
    assert error.value.reason is Reason.MALFORMED_REQUEST
