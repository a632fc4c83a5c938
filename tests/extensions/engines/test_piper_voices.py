"""Voices of piper in files, and the speaker over a stand-in for the libraries."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_caller import RecordedCaller

from weft_extensions.engines.engine_host.http_server import INVALID_FIELD, RefusedError
from weft_extensions.engines.engine_host.speech import SpeechRequest
from weft_extensions.engines.piper.server import PiperSpeaker
from weft_extensions.engines.piper.voices import find_voices

CONFIGURATION: dict[str, Any] = {
    "audio": {"sample_rate": 22050},
    "espeak": {"voice": "en-us"},
    "language": {"code": "en_US"},
    "num_symbols": 256,
    "num_speakers": 1,
    "phoneme_id_map": {"_": [0]},
    "inference": {"length_scale": 2.0},
}


def _voice(folder: Path, name: str, model: bytes = b"good", **changed: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.onnx").write_bytes(model)
    (folder / f"{name}.onnx.json").write_text(json.dumps({**CONFIGURATION, **changed}))
    return folder / f"{name}.onnx"


class Session:
    """A model of the stand-in: a file is good, or not."""

    def __init__(self, path: str, **options: Any) -> None:
        assert options["providers"] == ["CPUExecutionProvider"]
        content = Path(path).read_bytes()
        if content == b"truncated":
            raise RuntimeError("Protobuf parsing failed.")
        self._inputs = ["image"] if content == b"picture" else ["input", "input_lengths", "scales"]

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._inputs]


class LibraryVoice:
    def __init__(self, session: Session, config: SimpleNamespace, download_dir: Path) -> None:
        del session, config
        assert not download_dir.exists()

    def synthesize(self, text: str, wanted: SimpleNamespace) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(audio_int16_bytes=f"{text} {wanted.length_scale} {wanted.speaker_id}".encode())


def _from_dict(configuration: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        sample_rate=configuration["audio"]["sample_rate"],
        num_speakers=configuration["num_speakers"],
        length_scale=configuration["inference"]["length_scale"],
    )


PIPER = SimpleNamespace(
    PiperConfig=SimpleNamespace(from_dict=_from_dict), PiperVoice=LibraryVoice, SynthesisConfig=SimpleNamespace
)
ONNX = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session)


def _speaker(folder: Path, max_loaded: int = 2) -> PiperSpeaker:
    return PiperSpeaker(PIPER, ONNX, find_voices(folder, {}), threads=1, max_loaded=max_loaded)


def _said(over: PiperSpeaker, voice: str, **fields: Any) -> str:
    request = SpeechRequest(text="Hi", voice=voice, format="wav", **fields)
    return b"".join(over.samples("Hi", request, RecordedCaller())).decode()


def test_voices_are_found_in_subfolders_and_by_name(tmp_path: Path) -> None:
    _voice(tmp_path / "en" / "en_US", "en_US-amy-low")
    _voice(tmp_path, "de_DE-thorsten", num_speakers=2, speaker_id_map={"happy": 1, "sad": 0})
    own = _voice(tmp_path / "own", "x")
    (tmp_path / "notes.json").write_text("{}")
    found = find_voices(tmp_path, {"mine": own})
    assert [files.name for files in found] == ["mine", "de_DE-thorsten", "en_US-amy-low", "x"]
    assert [list(files.voice.speakers) for files in found[:2]] == [[], ["happy", "sad"]]
    assert found[0].voice.language == "en_US"
    assert not any(files.fault for files in found)


def test_single_file_is_a_voice_and_a_folder_without_voices_is_refused(tmp_path: Path) -> None:
    model = _voice(tmp_path / "one", "amy")
    assert [files.name for files in find_voices(model, {})] == ["amy"]
    (tmp_path / "none").mkdir()
    with pytest.raises(RefusedError, match="there is no voice"):
        find_voices(tmp_path / "none", {})


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"audio": {}}, "audio.sample_rate must be 8000 to 48000"),
        ({"audio": {"sample_rate": 10**9}}, "audio.sample_rate"),
        ({"espeak": None}, "espeak.voice is missing"),
        ({"phoneme_id_map": []}, "phoneme_id_map is missing"),
        ({"num_symbols": "256"}, "num_symbols"),
        ({"num_speakers": None}, "num_speakers"),
        ({"inference": []}, "inference is not an object"),
        ({"phoneme_type": "pinyin"}, "phonemes of the type pinyin are not supported"),
        ({"phoneme_type": ["espeak"]}, "are not supported"),
    ],
)
def test_broken_configuration_affects_only_its_voice(tmp_path: Path, changed: dict[str, Any], fault: str) -> None:
    _voice(tmp_path, "bad", **changed)
    _voice(tmp_path, "good")
    bad, good = find_voices(tmp_path, {})
    assert fault in bad.fault
    assert not good.fault
    with pytest.raises(RefusedError, match="voice: bad cannot be used") as refused:
        _speaker(tmp_path).sample_rate("bad")
    assert refused.value.kind == INVALID_FIELD
    assert _speaker(tmp_path).sample_rate("good") == 22050


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "[]", "\x00"])
def test_non_object_configuration_is_a_fault(tmp_path: Path, content: str) -> None:
    _voice(tmp_path, "bad")
    (tmp_path / "bad.onnx.json").write_text(content)
    (bad,) = find_voices(tmp_path, {})
    assert bad.fault


def test_voice_without_a_configuration_or_with_an_empty_model_is_a_fault(tmp_path: Path) -> None:
    _voice(tmp_path, "a").with_name("a.onnx.json").unlink()
    _voice(tmp_path, "b", b"")
    assert all(files.fault for files in find_voices(tmp_path, {}))


@pytest.mark.parametrize(("model", "said"), [(b"truncated", "Protobuf"), (b"picture", "inputs image")])
def test_model_that_is_not_a_voice_is_refused_on_use(tmp_path: Path, model: bytes, said: str) -> None:
    _voice(tmp_path, "bad", model)
    with pytest.raises(RefusedError, match=said) as refused:
        _speaker(tmp_path).sample_rate("bad")
    assert refused.value.kind == INVALID_FIELD


def test_speed_and_speaker_reach_the_library(tmp_path: Path) -> None:
    _voice(tmp_path, "one")
    _voice(tmp_path, "two", speaker_id_map={"happy": 1, "sad": 0})
    speaker = _speaker(tmp_path)
    assert _said(speaker, "one", speed=4.0) == "Hi 0.5 None"
    assert _said(speaker, "two", speaker="happy") == "Hi 2.0 1"


def test_least_recently_used_voice_is_evicted(tmp_path: Path) -> None:
    for name in "abc":
        _voice(tmp_path, name)
    speaker = _speaker(tmp_path, max_loaded=2)
    first = speaker.load("a")
    speaker.load("b")
    assert speaker.load("a") is first
    speaker.load("c")
    assert speaker.load("a") is first
    kept = speaker.load("c")
    speaker.load("b")
    assert speaker.load("c") is kept
    assert speaker.load("a") is not first
