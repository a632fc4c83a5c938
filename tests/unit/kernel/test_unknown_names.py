"""The sentence for a name that nothing has: with the name, and with those that are close to it."""

import time

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import closest_names
from weft.kernel.values.unknown_names import (
    AGENT,
    MODEL,
    MODEL_OR_POOL,
    POOL,
    ROUTE,
    RUNNER,
    SECRET,
    TARGET,
    among,
    close_names_of,
    kind_and_name,
    unknown_field_target,
    unknown_name,
    unknown_target,
)

NAMES = ["smollm2-135m", "qwen3-8b", "agent/writer", "route/coding"]
KINDS = (MODEL, POOL, AGENT, ROUTE, RUNNER, SECRET, TARGET, MODEL_OR_POOL)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_same_sentence_with_the_name_and_close_names(kind: str) -> None:
    error = unknown_name(kind, "smolm2", NAMES)
    assert error.message == f"there is no {kind} smolm2; did you mean smollm2-135m?"
    assert close_names_of(error) == ("smollm2-135m",)
    assert (error.metadata["unknown_kind"], error.metadata["unknown_name"]) == (kind, "smolm2")


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_name_without_close_names_lists_the_available_ones(kind: str) -> None:
    error = unknown_name(kind, "zzz", NAMES)
    assert error.message == f"there is no {kind} zzz; there are agent/writer, qwen3-8b, route/coding, smollm2-135m"
    assert "close_names" not in error.metadata
    assert unknown_name(kind, "zzz").message.startswith(f"there is no {kind} zzz; `weft get ")
    many = unknown_name(kind, "zzz", [f"m{number}" for number in range(1000)]).message
    assert f"there is no {kind} zzz; there are m0, m1, m10, m100, m101, and those that `weft get " in many


@pytest.mark.parametrize(
    ("typed", "close"),
    [
        ("smolm2", "smollm2-135m"),
        ("QWEN3-8B", "qwen3-8b"),
        ("qwen", "qwen3-8b"),
        ("135m", "smollm2-135m"),
        ("writer", "agent/writer"),
        ("smollm2-135m-instruct", "smollm2-135m"),
        ("smolm", "smollm2-135m"),
        ("smoll", "smollm2-135m"),
        ("mollm2", "smollm2-135m"),
        ("qwwen", "qwen3-8b"),
    ],
)
def test_close_names_share_a_prefix_or_substring_or_look_alike_in_any_case(typed: str, close: str) -> None:
    assert closest_names(typed, NAMES)[0] == close


@pytest.mark.parametrize(
    "typed", ["small", "smart", "sm", "qw", "qwn", "llama", "mistral", "qwem", "8b-chat", "gpt-oss"]
)
def test_name_with_only_common_letters_is_not_close(typed: str) -> None:
    """A suggestion for "smolm" must not bring one for every word."""
    assert closest_names(typed, NAMES) == ()


@pytest.mark.parametrize(
    ("target", "kind", "close"),
    [
        ("agent/writr", "agent", ("agent/writer",)),
        ("route/codin", "route", ("route/coding",)),
        ("agent/smollm2-135m", "agent", ()),
        ("smolm2", TARGET, ("smollm2-135m",)),
    ],
)
def test_request_prefix_selects_the_kind_of_name(target: str, kind: str, close: tuple[str, ...]) -> None:
    error = unknown_target(target, NAMES)
    assert (error.reason, error.metadata["field"]) == (Reason.MODEL_NOT_FOUND, "model")
    assert (kind_and_name(target)[0], close_names_of(error)) == (kind, close)
    assert f"there is no {kind} {target.rpartition('/')[2]};" in error.message


def test_gateway_replaces_suggestions_with_names_visible_to_the_caller() -> None:
    error = unknown_field_target("secret-a", ["secret-alpha"], "lines[1].model", " (a note)")
    assert "secret-alpha" in error.message
    shown = among(error, ["team-secret-a"])
    begin = "lines[1].model: there is no model, pool, agent, route or workflow secret-a; "
    assert shown.message == f"{begin}did you mean team-secret-a? (a note)"
    listed = among(shown, ["qwen"])
    assert listed.message.endswith("route or workflow secret-a; there is qwen (a note)")
    hidden = among(shown, [])
    assert "team-secret-a" not in hidden.message + str(hidden.metadata)
    other = WeftError(Reason.QUEUE_FULL, "the queue is full")
    assert among(other, NAMES) is other
    assert other.message == "the queue is full"


def test_close_names_are_few_and_found_quickly_among_many_long_ones() -> None:
    names = [f"model-{number:06d}-{'x' * 100}" for number in range(20_000)]
    began = time.process_time()
    assert len(closest_names("model-0", names)) == 3
    assert len(closest_names("m" * 100_000, names)) <= 3
    assert time.process_time() - began < 5


def test_name_with_control_characters_is_shown_without_them() -> None:
    assert "\x1b" not in unknown_name(MODEL, "a\x1b[2Jb").message
