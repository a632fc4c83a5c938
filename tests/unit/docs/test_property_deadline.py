"""No property test fails because one of its examples took longer than 200 ms on a busy machine."""

from pathlib import Path

from hypothesis import settings
from kit.examples import examples

TESTS = Path(__file__).parents[2]


def test_every_property_runs_under_the_profile_without_a_deadline() -> None:
    """It imports `kit.examples`, which loads the profile, or says so itself."""
    modules = (path for path in TESTS.rglob("test_*.py") if "clients" not in path.relative_to(TESTS).parts)
    texts = {path.name: path.read_text("utf-8") for path in modules}
    users = {name: text for name, text in texts.items() if "\nfrom hypothesis" in text}
    assert len(users) > 40
    assert [
        name for name, text in users.items() if "from kit.examples import" not in text and "deadline=None" not in text
    ] == []


def test_the_profile_has_no_deadline() -> None:
    assert (settings().deadline, examples(10)) == (None, 10)
