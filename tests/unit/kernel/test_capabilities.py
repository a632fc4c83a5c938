"""What is known of a model from its settings, its files and its engine together."""

import pytest

from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.kernel.requests.capabilities import (
    EVERY_MODE,
    UNKNOWN,
    Capabilities,
    ThinkingMode,
    capabilities_message,
    capabilities_of,
    complete_list,
    known_capabilities,
    reported_over,
    takes_mode,
    untaken_words,
)
from weft.kernel.requests.request_values import Skill

TEXT, IMAGE, AUDIO, TOOLS = Skill.TEXT, Skill.IMAGE, Skill.AUDIO, Skill.TOOLS
NO_THINKING = frozenset({ThinkingMode.DEFAULT, ThinkingMode.DISABLED})


def skills(*found: Skill) -> Capabilities:
    return Capabilities(skills=frozenset(found))


def lacking(*found: Skill) -> Capabilities:
    return Capabilities(lacking=frozenset(found))


@pytest.mark.parametrize(
    ("declared", "engine", "files", "has", "lacks"),
    [
        (UNKNOWN, UNKNOWN, UNKNOWN, set(), set()),
        (complete_list(frozenset({TEXT, TOOLS})), UNKNOWN, lacking(TOOLS), {TEXT, TOOLS}, {IMAGE, AUDIO}),
        (complete_list(frozenset({TEXT})), skills(IMAGE), UNKNOWN, {TEXT}, {IMAGE, AUDIO, TOOLS}),
        (complete_list(frozenset({TEXT, IMAGE})), lacking(IMAGE), UNKNOWN, {TEXT}, {IMAGE, AUDIO, TOOLS}),
        (UNKNOWN, skills(IMAGE), lacking(IMAGE, AUDIO), {IMAGE}, {AUDIO}),
        (UNKNOWN, lacking(IMAGE), skills(IMAGE, TEXT), {TEXT}, {IMAGE}),
        (UNKNOWN, UNKNOWN, lacking(IMAGE), set(), {IMAGE}),
    ],
)
def test_skill_sources_rank_engine_refusal_declaration_engine_report_then_files(
    declared: Capabilities, engine: Capabilities, files: Capabilities, has: set[Skill], lacks: set[Skill]
) -> None:
    found = known_capabilities(declared=declared, engine=engine, files=files)
    assert found.skills == has
    assert found.lacking == lacks


def test_modes_and_languages_come_from_the_highest_ranked_source_that_has_any() -> None:
    declared = Capabilities(thinking_modes=NO_THINKING)
    engine = Capabilities(thinking_modes=EVERY_MODE, source_languages=("nl",), target_languages=("en", "de"))
    found = known_capabilities(declared=declared, engine=engine, files=Capabilities(source_languages=("xx",)))
    assert found.thinking_modes == NO_THINKING
    assert (found.source_languages, found.target_languages) == (("nl",), ("en", "de"))


def test_request_may_need_skills_not_known_to_be_missing() -> None:
    assert UNKNOWN.possible_skills is None
    assert skills(TEXT).possible_skills is None
    assert lacking(IMAGE).possible_skills == frozenset({TEXT, AUDIO, TOOLS})


def test_unknown_thinking_mode_is_tried_and_the_default_is_always_accepted() -> None:
    assert all(takes_mode(frozenset(), mode) for mode in ThinkingMode)
    assert takes_mode(NO_THINKING, ThinkingMode.DISABLED)
    assert not takes_mode(NO_THINKING, ThinkingMode.ENABLED)
    assert takes_mode(frozenset({ThinkingMode.ENABLED}), ThinkingMode.DEFAULT)


def test_refusal_lists_everything_unsupported() -> None:
    assert untaken_words(frozenset(), NO_THINKING, ThinkingMode.DEFAULT) == ""
    both = untaken_words(frozenset({TOOLS, IMAGE}), NO_THINKING, ThinkingMode.ENABLED)
    assert both == "does not support images and does not support tools and does not support thinking"
    always = frozenset({ThinkingMode.DEFAULT, ThinkingMode.ENABLED})
    assert untaken_words(frozenset(), always, ThinkingMode.DISABLED) == "does not answer without thinking"
    unswitched = untaken_words(frozenset(), frozenset({ThinkingMode.DEFAULT}), ThinkingMode.ENABLED)
    assert unswitched == "has no setting for thinking"


def test_abilities_message_is_complete_and_absent_if_nothing_is_known() -> None:
    known = Capabilities(
        skills=frozenset({TEXT}),
        lacking=frozenset({IMAGE}),
        thinking_modes=EVERY_MODE,
        source_languages=("nl", "zho_Hant"),
        target_languages=("en",),
    )
    message = capabilities_message(known)
    assert message is not None
    assert capabilities_of(message) == known
    assert capabilities_message(UNKNOWN) is None


def test_skills_and_modes_of_a_newer_version_are_ignored() -> None:
    message = model_pb2.ModelAbilities.FromString(bytes([0x0A, 2, 1, 99, 0x1A, 2, 3, 77]))
    assert capabilities_of(message) == Capabilities(
        skills=frozenset({TEXT}), thinking_modes=frozenset({ThinkingMode.DISABLED})
    )


def test_mesh_declaration_cannot_override_an_engine_refusal() -> None:
    report = runner_pb2.InstanceState(abilities=capabilities_message(lacking(IMAGE)))
    assert reported_over(frozenset({TEXT, IMAGE}), report).skills == {TEXT}
    assert reported_over(frozenset(), None) == UNKNOWN
    assert reported_over(frozenset({TEXT}), runner_pb2.InstanceState()).lacking == {IMAGE, AUDIO, TOOLS}
