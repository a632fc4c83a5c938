"""The choice of a voice."""

from typing import Any

import pytest
from kit.failures import fails

from runner_svc.policy.voices import MAX_LISTED, ChosenVoice, KnownVoice, VoiceCatalog
from weft.kernel.errors.error_tree import FieldError

VOICES = (
    KnownVoice(name="en-gb", language="en-gb", aliases=("English_(Great_Britain)",)),
    KnownVoice(name="de", language="de", aliases=("German",)),
    KnownVoice(name="libri", language="en-US", speakers=("p1", "p2")),
    KnownVoice(name="broken", fault="broken.onnx.json is not valid JSON"),
)


def _catalog(**fields: Any) -> VoiceCatalog:
    return VoiceCatalog(**{"voices": VOICES, **fields})


@pytest.mark.parametrize(
    ("asked", "name", "speaker"),
    [
        ("de", "de", ""),
        ("DE", "de", ""),
        ("German", "de", ""),
        ("english_(great_britain)", "en-gb", ""),
        ("libri/p2", "libri", "p2"),
        ("libri", "libri", ""),
        ("", "en-gb", ""),
        ("speaker", "libri", "p1"),
    ],
)
def test_voice_is_found_by_name_or_speaker(asked: str, name: str, speaker: str) -> None:
    catalog = _catalog(aliases={"speaker": "libri/p1"}).checked()
    assert catalog.choose(asked) == ChosenVoice(name=name, speaker=speaker)


def test_default_voice_replaces_an_openai_voice_with_a_warning() -> None:
    chosen = _catalog(default="libri/p2").choose("Alloy")
    assert (chosen.name, chosen.speaker) == ("libri", "p2")
    assert chosen.warning is not None
    assert chosen.warning.field == "voice"
    assert "Alloy" in chosen.warning.message


def test_alias_takes_precedence_over_openai_names() -> None:
    assert _catalog(aliases={"alloy": "de"}).choose("alloy") == ChosenVoice(name="de")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("en-bg", "did you mean en-gb"),
        ("nosuch", "this model has no voice 'nosuch'; it has en-gb, de, libri"),
        ("libri/p9", "libri has no speaker 'p9'"),
        ("broken", "broken cannot be used: broken.onnx.json is not valid JSON"),
        ("--help", "no voice '--help'"),
        ("x" * 5000, "no voice"),
    ],
)
def test_unknown_voice_is_refused_by_name_with_similar_names(asked: str, said: str) -> None:
    with fails(field="voice") as refused:
        _catalog().choose(asked)
    assert said in refused.value.message
    assert len(refused.value.message) < 500


def test_voice_list_in_an_error_is_bounded() -> None:
    voices = [KnownVoice(name=f"voice-{number}") for number in range(500)]
    with pytest.raises(FieldError) as refused:
        VoiceCatalog(voices=voices).choose("zz")
    assert refused.value.message.count("voice-") == MAX_LISTED
    assert "and 480 more" in refused.value.message


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"default": "nosuch"}, "default_voice"), ({"aliases": {"nova": "nosuch"}}, "voice_aliases.nova")],
)
def test_setting_with_an_unknown_voice_is_refused_at_load(fields: dict[str, Any], setting: str) -> None:
    with fails(field=setting):
        _catalog(**fields).checked()


def test_model_without_a_usable_voice_is_refused_at_load() -> None:
    with pytest.raises(FieldError, match="is not valid JSON"):
        _catalog(voices=VOICES[3:]).checked()


def test_usable_voices_are_published_with_the_default_first() -> None:
    catalog = _catalog(default="de", aliases={"nova": "libri"}).checked()
    assert catalog.published == ("de", "nova", "en-gb", "libri")
