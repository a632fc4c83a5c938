"""Hooks of the documentation site: its menu, files of the repository that pages link to, and a check of what it loads.

The menu is that of docs/README.md, so that there is one list of pages. A file outside docs, such as a contract, becomes
a page of its own where a page links to it: the site works without a network and without the repository.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ASSETS = (
    DOCS / "site" / "iframe-worker.js",
    DOCS / "site" / "colors.css",
    ROOT / "gateway" / "workbench" / "page" / "icon.svg",
)
"""What the site needs besides pages; mark and colors are the workbench's."""
REDIRECTS = DOCS / "site" / "redirects.txt"
"""Pages that are gone, one a line: the old page, a blank, and the page that has its content now."""
LANGUAGES = {".py": "python", ".proto": "protobuf", ".yaml": "yaml", ".json": "json", ".sh": "bash"}
MAX_FILE_BYTES = 1024**2
_SECTION = re.compile(r"^## (?P<title>.+)\n+(?P<items>(?:- .*\n)+)", re.MULTILINE)
_ITEM = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[^)]+)\)", re.MULTILINE)
_LINK = re.compile(r"(?P<before>\[[^\[\]]*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_FENCE = re.compile(r"^( *)```.*?^\1``` *$", re.MULTILINE | re.DOTALL)
_LIST = re.compile(r"(?m)^(?P<text>(?!\s*(?:[-*|#>]|\d+\.)).*\S.*)\n(?=- )")
_LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"(?P<a>[^\"]+)|<link[^>]+href=\"(?P<b>[^\"]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Takes the menu from the index."""
    text = (DOCS / "README.md").read_text("utf-8")
    menu: list[dict[str, object]] = [{"Documentation": "README.md"}]
    for section in _SECTION.finditer(text):
        pages: list[object] = [{item["title"]: item["page"]} for item in _ITEM.finditer(section["items"])]
        menu.append({section["title"]: pages})
    records = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    menu.append({"Decisions": [f"decisions/{name}" for name in records]})
    contracts = [{path.stem: _page_of(path)} for path in _contracts()]
    menu.append({"Contracts": contracts})
    config.nav = menu
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files of the repository that pages link to, those that these link to, and all contracts."""
    for asset in ASSETS:
        files.append(File.generated(config, f"assets/{asset.name}", content=asset.read_text("utf-8")))
    wanted = {path for file in files.documentation_pages() for path in _linked(DOCS / file.src_uri)}
    done: set[Path] = set()
    waiting = [*wanted, *_contracts()]
    while waiting:
        path = waiting.pop()
        if path in done or path.is_relative_to(DOCS):
            continue
        done.add(path)
        files.append(File.generated(config, _page_of(path), content=_content(path)))
        if path.suffix == ".md":
            waiting.extend(_linked(path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links to files of the repository, and sets a list off from the text above it, as code hosts show it."""
    del config, files
    source = page.file.src_uri
    if source.startswith("repository/") and not source.endswith(".md.md"):
        return markdown
    origin = _origin(source)
    return _outside_code(markdown, lambda text: _LIST.sub(r"\g<text>\n\n", _linked_pages(text, origin, source)))


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the redirects, and refuses a site that loads anything from elsewhere."""
    for line in REDIRECTS.read_text("utf-8").splitlines():
        old, new = line.split()
        _redirect(Path(config.site_dir), File(old, DOCS.as_posix(), "", False), File(new, DOCS.as_posix(), "", False))
    for page in Path(config.site_dir).rglob("*.html"):
        for found in _LOADED.finditer(page.read_text("utf-8")):
            loaded = found["a"] or found["b"]
            if loaded.startswith(("http:", "https:", "//")):
                raise PluginError(f"{page} loads {loaded}: the site must work without a network")


def _redirect(site: Path, old: File, new: File) -> None:
    page = site / old.dest_uri
    if page.exists() or not (site / new.dest_uri).exists():
        raise PluginError(f"{REDIRECTS.name}: {old.src_uri} still exists, or {new.src_uri} does not")
    page.parent.mkdir(parents=True, exist_ok=True)
    url = new.url_relative_to(old)
    refresh = f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">'
    page.write_text(f'{refresh}<a href="{url}">moved</a>\n', "utf-8")


def _contracts() -> list[Path]:
    return sorted((ROOT / "protos").rglob("*.proto"))


def _page_of(path: Path) -> str:
    return f"repository/{path.relative_to(ROOT).as_posix()}.md"


def _origin(source: str) -> Path:
    """Returns the folder of a page's file in the repository."""
    if source.startswith("repository/"):
        return (ROOT / source.removeprefix("repository/")).parent
    return (DOCS / source).parent


def _linked(page: Path) -> Iterator[Path]:
    """Yields the files outside docs that a page links to."""
    for found in _LINK.finditer(_FENCE.sub("", page.read_text("utf-8"))):
        target = (page.parent / found["target"]).resolve()
        if found["target"] and ":" not in found["target"] and target.is_file() and not target.is_relative_to(DOCS):
            yield target


def _linked_pages(text: str, origin: Path, source: str) -> str:
    def rewritten(found: re.Match[str]) -> str:
        target, anchor = found["target"], found["anchor"] or ""
        if not target or ":" in target:
            return found[0]
        file = (origin / target).resolve()
        if file.is_dir():
            index = file / "README.md"
            if not (file.is_relative_to(DOCS) and index.is_file()):
                return found["before"][1:-1]  # a folder has no page: its name remains
            file = index
        place = file.relative_to(DOCS).as_posix() if file.is_relative_to(DOCS) else _page_of(file)
        return f"{found['before']}({relpath(place, Path(source).parent.as_posix() or '.')}{anchor})"

    return _LINK.sub(rewritten, text)


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    pieces, end = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, change(markdown[end:])])


def _content(path: Path) -> str:
    text = path.read_bytes()[:MAX_FILE_BYTES].decode("utf-8", "replace")
    if path.suffix == ".md":
        return text
    return f"# {path.relative_to(ROOT).as_posix()}\n\n``````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n``````\n"
