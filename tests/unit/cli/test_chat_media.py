"""Files that a message shows to the model: read within bounds, and known by their first bytes."""

from pathlib import Path

import pytest

from weft.client._messages import chat_request
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.media_types import AUDIO_FORMATS, audio_type_of, image_type_of
from weft_app.cli import chat
from weft_app.cli.chat import read_media, user_message
from weft_testing.media_files import bmp, gif, jpeg, mp3, png, wav, webp


def test_message_has_files_before_text(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(jpeg(4, 4))
    (tmp_path / "talk.wav").write_bytes(wav(seconds=0.5))
    turn = user_message("What is it?", read_media([tmp_path / "photo.jpg"], [tmp_path / "talk.wav"]))
    (message,) = chat_request("m", [turn], {}).payload.messages
    assert [part.WhichOneof("kind") for part in message.content] == ["image", "audio", "text"]
    assert message.content[0].image.media_type == "image/jpeg"
    assert message.content[1].audio.media_type == "audio/wav"
    assert message.content[2].text == "What is it?"


def test_message_without_files_is_plain_text() -> None:
    assert user_message("hi", read_media(None, None)) == {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("data", "image", "audio"),
    [
        (png(2, 2), "image/png", None),
        (jpeg(2, 2), "image/jpeg", None),
        (gif(2, 2), "image/gif", None),
        (webp(2, 2), "image/webp", None),
        (bmp(2, 2), "image/bmp", None),
        (wav(seconds=0.1), None, "audio/wav"),
        (mp3(frames=40), None, "audio/mpeg"),
        (b"<svg/>", None, None),
        (b"", None, None),
    ],
)
def test_file_type_is_detected_from_its_first_bytes(data: bytes, image: str | None, audio: str | None) -> None:
    assert (image_type_of(data), audio_type_of(data)) == (image, audio)


@pytest.mark.parametrize("option", ["--image", "--audio"])
def test_invalid_file_error_names_option_and_file(tmp_path: Path, option: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for name, words in (("notes.txt", "is not a "), ("missing", "cannot be read")):
        files = [tmp_path / name]
        with pytest.raises(FieldError, match=words) as refused:
            read_media(*((files, None) if option == "--image" else (None, files)))
        assert refused.value.field == option


def test_errors_list_every_kind_of_recording_that_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FieldError, match=AUDIO_FORMATS):
        read_media(None, [tmp_path / "notes.txt"])
    with pytest.raises(FieldError, match=AUDIO_FORMATS):
        chat_request("m", [{"role": "user", "content": "hi", "audio": [b"hello"]}], {})


def test_file_above_the_limit_is_refused_without_a_full_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_FILE_BYTES", 64)
    (tmp_path / "photo.png").write_bytes(png(64, 64))
    with pytest.raises(FieldError, match="is larger than"):
        read_media([tmp_path / "photo.png"], None)


def test_total_file_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_TOTAL_BYTES", 100)
    (tmp_path / "photo.png").write_bytes(png(2, 2))
    with pytest.raises(FieldError, match="together"):
        read_media([tmp_path / "photo.png"] * 3, None)


@pytest.mark.parametrize(("field", "data"), [("images", b"no image"), ("audio", png(2, 2))])
def test_client_refuses_files_of_unknown_types(field: str, data: bytes) -> None:
    with pytest.raises(FieldError, match="must be") as refused:
        chat_request("m", [{"role": "user", "content": "hi", field: [data]}], {})  # type: ignore[misc]  # a name
    assert refused.value.field == field
