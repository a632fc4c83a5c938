"""The files of the workbench's page: whole, as vendored, small before the first use, and named by their content."""

import gzip
import json
import re
from hashlib import sha256
from pathlib import Path, PurePosixPath
from posixpath import normpath

import pytest
from gateway_script import WORKBENCH

from gateway.workbench.page_files import ASSETS, FOLDER, TABLE, TYPES, PageFiles
from weft_app.cli.launch_tools import TOOLS

MAX_FIRST_BYTES = 60_000
"""What a browser loads before the page can be used first, compressed."""
MAX_MODULE_LINES = 400
ENTRY = "app/main.js"
FILES = {name: file.body for name, file in WORKBENCH.assets.items()}
"""What a gateway with all extensions serves, by path below the page's folder."""
MODULES = {name: body.decode() for name, body in FILES.items() if re.fullmatch(r"app/.*\.js", name)}
_IMPORT = re.compile(r"""(?:^|;)\s*(?:import|export)\s*(?:[\w$*{},\s]*?\bfrom\s*)?["']([^"']+)["']""", re.MULTILINE)
_LATER = re.compile(r"""\bimport\(["']([^"']+)["']\)""")


def import_map() -> dict[str, str]:
    text = (FOLDER / "index.html").read_text()
    found = re.search(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    assert found
    return {name: path.removeprefix(ASSETS) for name, path in json.loads(found[1])["imports"].items()}


def imports(module: str, pattern: re.Pattern[str] = _IMPORT) -> set[str]:
    """What a module imports, as paths below the page's folder."""
    names = pattern.findall(re.sub(r"^\s*//.*$", "", FILES[module].decode(), flags=re.MULTILINE))
    known = import_map()
    base = PurePosixPath(module).parent
    return {known[name] if name in known else _below(base, name) for name in names}


def _below(base: PurePosixPath, name: str) -> str:
    if name.startswith("weft/"):
        return name.replace("weft/", import_map()["weft/"], 1)
    assert name.startswith("."), f"{base} imports {name}, which the import map lacks"
    return normpath(base / name)


def loaded_with(module: str) -> set[str]:
    """A module and all that it imports, and they import."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        new = {each for one in new for each in imports(one)} - found
    return found


def test_every_import_of_every_module_exists() -> None:
    for module in MODULES:
        missing = [name for name in imports(module) | imports(module, _LATER) if name not in FILES]
        assert not missing, f"{module} imports {missing}"


def test_page_preloads_all_imports_of_its_first_module() -> None:
    text = (FOLDER / "index.html").read_text()
    preloaded = {path.removeprefix(ASSETS) for path in re.findall(r'rel="modulepreload" href="([^"]+)"', text)}
    assert preloaded | {ENTRY} == loaded_with(ENTRY)


def test_initially_loaded_assets_are_small() -> None:
    first = {"index.html", "style.css"} | loaded_with(ENTRY) | loaded_with("app/pages/overview.js")
    sizes = {name: len(gzip.compress(FILES.get(name) or (FOLDER / name).read_bytes())) for name in first}
    assert sum(sizes.values()) <= MAX_FIRST_BYTES, sizes


def test_vendored_modules_are_unmodified() -> None:
    folder = FOLDER / "vendor"
    entries = json.loads((folder / "vendor.json").read_text())
    pins = json.loads((FOLDER.parents[2] / "requirements" / "workbench" / "package.json").read_text())["dependencies"]
    packages = entries + [each for entry in entries for each in entry.get("bundles", ())]
    for entry in entries:
        assert sha256((folder / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
        assert pins.get(entry["package"], entry["version"]) == entry["version"]
    known = {entry["file"] for entry in entries} | {each["licenceFile"] for each in packages} | {"vendor.json"}
    assert known == {path.name for path in folder.iterdir()}


def test_every_page_file_is_served() -> None:
    left_out = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in TYPES]
    assert not left_out


def test_modules_have_a_maximum_length() -> None:
    long = {name: lines for name, text in MODULES.items() if (lines := text.count("\n")) > MAX_MODULE_LINES}
    assert not long


def test_programs_of_the_first_screen_are_those_of_weft_launch() -> None:
    text = (FOLDER / "app" / "pages" / "chat_welcome.js").read_text()
    listed = dict(re.findall(r'(\w+): "([^"]+)"', re.findall(r"const TOOLS = \{(.*?)\}", text)[0]))
    assert listed == {name: TOOLS[name].title for name in listed}


def test_components_read_the_revision_of_what_is_changed_in_place() -> None:
    """One that also reads a signal is otherwise drawn again only for the signal: the first screen of Chat was dead."""
    begins = re.compile(r"^(?:export )?function ([A-Z]\w*)\(\{([^}]*)\}\) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
    seen, missing = 0, []
    for module, text in MODULES.items():
        for name, props, body in begins.findall(text):
            for prop in {"conversation", "answer"} & {each.strip() for each in props.split(",")}:
                seen += 1
                if f"revisionOf({prop})" not in body:
                    missing.append(f"{name} of {module}: {prop}")
    assert seen
    assert not missing


def test_every_page_has_an_icon() -> None:
    pages = re.findall(r'\{ path: "(\w*)"(?!.* icon: "M)', MODULES[TABLE])
    icons = re.findall(r'^  "?(\w*)"?: "M', MODULES["app/parts/icons.js"], re.MULTILINE)
    assert pages
    assert set(pages) <= set(icons)


def test_page_can_be_installed() -> None:
    manifest = json.loads((FOLDER / "manifest.webmanifest").read_text())
    assert all((FOLDER / icon["src"]).is_file() for icon in manifest["icons"])
    assert f'<link rel="manifest" href="{ASSETS}manifest.webmanifest">' in (FOLDER / "index.html").read_text()


@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "dangerouslySetInnerHTML", "eval("])
def test_modules_create_no_elements_or_code_from_text(word: str) -> None:
    assert not [name for name, text in MODULES.items() if word in text]


@pytest.mark.parametrize(("depth", "folder"), [(0, "./"), (1, "../"), (3, "../../../")])
def test_page_links_its_files_from_any_depth_below_its_path(depth: int, folder: str) -> None:
    files = PageFiles()
    text = files.index(depth).body.decode()
    assert f'href="{folder}{files.version}/style.css"' in text
    assert f'"preact": "{folder}{files.version}/vendor/preact.mjs"' in text
    assert '="/' not in text


def test_modules_name_no_path_of_the_host() -> None:
    """A module that asks for `/v1/...` or shows `location.origin` leaves out the path at which a proxy has the mesh."""
    asking = re.compile(r"""\b(?:fetch|open)\(\s*["'`]/|location\.origin\}|["'`]/ui/""")
    found = {name for name, text in MODULES.items() if asking.search(text)}
    assert not found


def test_different_content_has_a_different_version(tmp_path: Path) -> None:
    versions = set()
    for text in ("one", "two"):
        (tmp_path / "index.html").write_text(f'<script type="module" src="{ASSETS}a.js"></script>')
        (tmp_path / "a.js").write_text(text)
        files = PageFiles(tmp_path)
        versions.add(files.version)
        assert f'src="./{files.version}/a.js"'.encode() in files.index(0).body
    assert len(versions) == 2


def test_import_map_is_allowed_by_its_digest_and_is_the_only_inline_script() -> None:
    policy = PageFiles().index(0).policy
    assert policy.count("'sha256-") == 1
    assert "'unsafe" not in policy
