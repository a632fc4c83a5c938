import re

from hypothesis import given
from hypothesis import strategies as st

from runner_svc.tools.tool_box import wire_names


def test_dots_and_colons_become_underscores() -> None:
    assert wire_names(["files.read", "a:b", "plain-name_1"]) == {
        "files.read": "files_read",
        "a:b": "a_b",
        "plain-name_1": "plain-name_1",
    }


def test_colliding_names_are_numbered_in_order() -> None:
    assert list(wire_names(["a.b", "a:b", "a_b"]).values()) == ["a_b", "a_b_2", "a_b_3"]


def test_taken_names_are_not_reused() -> None:
    assert wire_names(["files.read"], taken={"files_read", "files_read_2"}) == {"files.read": "files_read_3"}


def test_long_names_that_differ_at_the_end_stay_distinct() -> None:
    long = ["x" * 100 + "1", "x" * 100 + "2"]
    wires = list(wire_names(long).values())
    assert wires == ["x" * 64, "x" * 62 + "_2"]


@given(st.lists(st.text(alphabet="ab._:-é", max_size=80), max_size=20), st.sets(st.text(alphabet="ab_", max_size=3)))
def test_wire_names_are_always_unique_valid_and_not_taken(names: list[str], taken: set[str]) -> None:
    wires = wire_names(names, taken)
    assert set(wires) == set(names)
    assert len(set(wires.values())) == len(wires)
    assert not taken & set(wires.values())
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", wire) for wire in wires.values())
    assert wire_names(names, taken) == wires
