"""`make size` fails if a package has more lines than size.toml allows (.ci/size.py)."""

from pathlib import Path
from runpy import run_path

SIZE = run_path(str(Path(__file__).parents[3] / ".ci" / "size.py"))
FILES = {"weft/a.py": 60, "weft/kernel/b.py": 40, "wefts/c.py": 7}


def test_package_that_has_grown_is_reported_with_the_difference() -> None:
    assert list(SIZE["grown"]({"weft": 97}, FILES)) == ["weft has 100 lines, 3 more than in size.toml"]


def test_package_that_has_shrunk_or_stayed_is_fine() -> None:
    assert list(SIZE["grown"]({"weft": 100, "wefts": 8}, FILES)) == []
