"""The picture of the first minutes is what `make recording` drew."""

import html
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "first-minutes.svg"


def _recording() -> ModuleType:
    spec = spec_from_file_location("recording", ROOT / "docs" / "site" / "recording.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _shown() -> str:
    """The texts of the picture, line by line."""
    texts = re.findall(
        r"<text [^>]*clip-path=\"url\(#weft-line-(\d+)\)\"[^>]*>([^<]*)</text>", PICTURE.read_text("utf-8")
    )
    lines: dict[int, str] = {}
    for number, text in texts:
        lines[int(number)] = lines.get(int(number), "") + html.unescape(text).replace("\N{NO-BREAK SPACE}", " ")
    return "\n".join(lines[number].rstrip() for number in sorted(lines))


def test_picture_shows_the_recorded_commands_with_their_times() -> None:
    found = re.findall(r"^\$ (.*?) +# \d+\.\d s$", _shown(), re.MULTILINE)
    assert tuple(found) == _recording().COMMANDS


def test_picture_shows_a_receipt_and_no_local_path() -> None:
    shown = _shown()
    assert "Outcome:      completed" in shown
    assert not re.search(r"/(tmp|home|root|work)/", shown)


def test_picture_loads_no_resources() -> None:
    links = re.findall(r"(?:href|src|url)\W+https?://[^\"' )]+", PICTURE.read_text("utf-8"))
    assert links == []
