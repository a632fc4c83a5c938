"""Saved and changed inputs of every parser that faces a network. Longer runs: `make fuzz`."""

import random
from collections.abc import Iterator

import http_bodies
import pytest
from fuzz_parsers import mutated
from hypothesis import given, settings
from hypothesis import strategies as st
from network_parsers import CORPUS, PARSERS, Parser, clean_up, examples, saved_inputs

SLOW = frozenset({"template"})
"""They start a process."""


@pytest.fixture(scope="module", autouse=True)
def _cleaned_up() -> Iterator[None]:
    yield
    clean_up()


def _marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow("a process that renders templates")) if name in SLOW else name


NAMES = [_marked(name) for name in PARSERS]


def test_gateway_of_the_parser_answers_valid_bodies() -> None:
    """Otherwise changed bodies would be refused before they are read."""
    statuses = [http_bodies.send_body(content) for content in http_bodies.good_requests()]
    assert statuses.count(200) > len(statuses) // 2, statuses


@pytest.mark.parametrize("name", NAMES)
def test_saved_input_is_read_or_refused(name: str) -> None:
    """What fuzzing found is among them; the examples are read."""
    for path in saved_inputs(name):
        try:
            PARSERS[name].judge(path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.name}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_changed_input_is_read_or_refused(name: str, seed: int) -> None:
    pool, numbers = examples(name), random.Random(seed)
    PARSERS[name].judge(mutated(numbers.choice(pool), numbers, pool))


def test_every_parser_has_examples_and_every_corpus_its_parser() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= PARSERS.keys()
    assert all(examples(name) for name in PARSERS)


def test_error_that_is_no_refusal_is_detected() -> None:
    """The control: a parser without bounds fails on some changed input."""
    broken = Parser(lambda content: content[content[0]])
    numbers = random.Random(1)
    inputs = [mutated(b"\0some example", numbers, [b"other"]) for _ in range(1000)]
    with pytest.raises(IndexError):
        list(map(broken.judge, inputs))
