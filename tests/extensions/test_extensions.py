"""How extensions are found, disabled, and refused."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from weft import extension
from weft.documents.resource_kinds import ResourceKind
from weft.extension import (
    ApiHook,
    CommandHook,
    Extension,
    FoundExtension,
    disabled_extensions,
    installed_extensions,
    load_hook,
    own_extensions,
)
from weft.kernel.errors.error_tree import WeftError

GREETING = Extension(name="greeting", summary="Greets.", docs="docs/extensions.md")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Returns the entry points of other packages, by name."""
    points: dict[str, str] = {}

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [EntryPoint(name.rstrip("'"), value, group) for name, value in points.items()]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    installed_extensions.cache_clear()
    yield points
    installed_extensions.cache_clear()


def test_an_extension_of_another_package_is_found_by_its_entry_point(others: dict[str, str]) -> None:
    others["greeting"] = f"{__name__}:GREETING"
    (found,) = installed_extensions()
    assert (found.extension, found.fault) == (GREETING, "")
    assert extension.all_extensions()[-1] is GREETING


@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("greeting", "no_such_package:EXTENSION", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("greeting", f"{__name__}:CORE", f"WeftError: INTERNAL: {__name__}:CORE is no Extension"),
        ("farewell", f"{__name__}:GREETING", f"{__name__}:GREETING calls itself greeting"),
        ("simulate", f"{__name__}:GREETING", "another extension has the name simulate"),
    ],
)
def test_an_unusable_extension_says_why(others: dict[str, str], name: str, place: str, fault: str) -> None:
    others[name] = place
    (found,) = installed_extensions()
    assert isinstance(found, FoundExtension)
    assert found.extension is None
    assert found.fault.startswith(fault)
    assert [each.name for each in extension.all_extensions()] == [each.name for each in own_extensions()]


def test_two_packages_with_one_extension_are_both_unusable(others: dict[str, str]) -> None:
    others |= {"greeting": f"{__name__}:GREETING", "greeting'": f"{__name__}:GREETING"}
    assert [each.fault for each in installed_extensions()] == ["another extension has the name greeting"] * 2


def named(name: str, *requires: str) -> Extension:
    return Extension(name=name, summary="", docs="", requires=requires)


def test_disabling_an_extension_disables_those_that_require_it() -> None:
    found = [named("media"), named("voice", "media"), named("calls", "voice"), named("trials")]
    assert disabled_extensions(found, ["media"]) == {
        "media": "extensions.disabled names it",
        "voice": "it requires media, which is off",
        "calls": "it requires voice, which is off",
    }


def test_an_extension_without_what_it_requires_is_off() -> None:
    found = [named("voice", "media")]
    assert disabled_extensions(found, []) == {"voice": "it requires media, which is not installed"}


def test_a_disabled_name_without_an_extension_disables_nothing() -> None:
    assert disabled_extensions([named("media")], ["medium"]) == {}


@pytest.mark.parametrize("place", [f"{__name__}:GREETING", f"{__name__}:NOTHING"])
def test_a_hook_of_another_type_is_refused(place: str) -> None:
    with pytest.raises(WeftError, match="is no ApiHook"):
        load_hook(place, ApiHook)


def hooks() -> list[Any]:
    return [hook for each in own_extensions() for hook in (*each.apis, *each.commands)]


def test_descriptors_of_weft_are_complete() -> None:
    for each in own_extensions():
        assert each.summary.endswith("."), each.name
        assert each.apis or each.commands or each.runtimes or each.listeners or each.server_tools, each.name


def test_kinds_of_extensions_are_kinds() -> None:
    assert {kind for each in own_extensions() for kind in each.kinds} <= {kind.value for kind in ResourceKind}


def test_hooks_name_no_command_twice() -> None:
    words = [hook.words for hook in hooks() if isinstance(hook, CommandHook)]
    assert len(words) == len(set(words))
