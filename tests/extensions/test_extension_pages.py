"""The pages of extensions in the workbench: their files and rows are there if the extension is on, and only then."""

from pathlib import Path

import pytest
from asgi_call import answer_of
from structlog.testing import capture_logs
from test_extension_apis import app_with

from gateway.workbench.page_files import ROWS, TABLE, PageFiles
from weft.extension import PageHook, own_extensions

PAGE = PageHook(
    path="greetings",
    title='"Greetings"',
    group="Mesh",
    needs="models:view",
    package="weft_greetings",
    module="greetings.js",
    icon="M2 2h4",
    keys=((("G",), "Greet"),),
)
ROW = (
    r'  { path: "greetings", title: "\"Greetings\"", group: "Mesh", needs: "models:view", icon: "M2 2h4", '
    r'keys: [[["G"], "Greet"]], load: () => import("./extensions/greetings/greetings.js") },'
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package with a page."""
    folder = tmp_path / "weft_greetings" / "page"
    folder.mkdir(parents=True)
    folder.joinpath("greetings.js").write_text("export const Page = () => null;\n")
    folder.parent.joinpath("__init__.py").write_text("raise AssertionError('its code is not needed')\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_page_of_another_package_is_served_and_has_a_row() -> None:
    without, files = PageFiles(), PageFiles(pages=[PAGE])
    assert files.assets["app/extensions/greetings/greetings.js"].body == b"export const Page = () => null;\n"
    assert ROW in files.assets[TABLE].body.decode().splitlines()
    assert ROWS.encode() not in without.assets[TABLE].body
    assert "greetings" not in without.assets[TABLE].body.decode()
    assert files.version != without.version


def test_page_without_files_has_no_row_and_leaves_the_others() -> None:
    with capture_logs() as logs:
        files = PageFiles(pages=[PAGE, PAGE._replace(package="weft_greetings.no_such_part")])
        assert files.assets.keys() == PageFiles().assets.keys()
    assert "greetings" not in files.assets[TABLE].body.decode()
    assert [each["event"] for each in logs] == ["page of an extension has no files"] * 2


@pytest.mark.parametrize("disabled", [(), ("trials",)])
async def test_page_of_trials_is_there_unless_the_extension_is_off(disabled: tuple[str, ...]) -> None:
    extensions = [each for each in own_extensions() if each.name not in disabled]
    version = PageFiles(pages=[page for each in extensions for page in each.pages]).version
    app = app_with(extensions)
    table = await answer_of(app, "GET", f"/ui/{version}/{TABLE}")
    module = await answer_of(app, "GET", f"/ui/{version}/app/extensions/trials/trials.js")
    assert (table.status, b'"trials"' in table.body) == (200, not disabled)
    assert module.status == (404 if disabled else 200)
