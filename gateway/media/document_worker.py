"""The process that extracts the text of one PDF or web page, from standard input; its answer is a JSON document.

Arguments: `pdf`; or `page`, its URL and the character set that its server told, which may be empty.

Reading is slow and the author unknown, so it has its own process with limits of memory and processor time. It imports
nothing of weft and starts with `python -I`.
"""

import io
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urljoin

if TYPE_CHECKING:
    from justhtml import Node
    from justhtml.transforms import TransformSpec

MAX_PAGES = 500
MAX_CHARS = 2 * 1024 * 1024
MAX_PAGE_BYTES = 1024 * 1024
"""The part of a web page that is read: its beginning."""
CPU_SECONDS = 30
MEMORY_BYTES = 1024 * 1024 * 1024
_NICE = 10
_FEWER_PAGES = "attach only the pages that you need"
_NO_TEXT = "script, style, noscript, template, iframe, nav, img, picture, svg, form, [hidden]"
"""Elements of a web page that are left out."""


class UnusablePdfError(Exception):
    """The words that complete "the PDF ...", with the next step."""


def extracted(data: bytes, max_pages: int = MAX_PAGES, max_chars: int = MAX_CHARS) -> dict[str, object]:
    """Returns the `text` and the number of `pages`, or an `error` that completes "the PDF ..." with the next step."""
    from pypdf.errors import LimitReachedError  # noqa: PLC0415 - imported within the limits

    try:
        texts = _texts_of_pages(data, max_pages, max_chars)
    except UnusablePdfError as error:
        return {"error": str(error)}
    except (LimitReachedError, MemoryError, RecursionError):
        return {"error": f"is too complex: print it to a new PDF, or {_FEWER_PAGES}"}
    except Exception:  # noqa: BLE001 - a damaged file can fail anywhere in the library
        return {"error": "is damaged: open it in a viewer, print it to a new PDF and attach that"}
    text = "\n\n".join(texts).strip().encode("utf-8", "replace").decode()
    if not text:
        return {"error": "has no text, only images: recognize its text (OCR) first, or attach its pages as images"}
    return {"text": text, "pages": len(texts)}


def _texts_of_pages(data: bytes, max_pages: int, max_chars: int) -> list[str]:
    from pypdf import PdfReader  # noqa: PLC0415 - imported within the limits

    reader = PdfReader(io.BytesIO(data))
    # Many files are encrypted with an empty password, which only restricts editing.
    if reader.is_encrypted and not reader.decrypt(""):
        raise UnusablePdfError("is encrypted: remove its password and attach it again")
    if len(reader.pages) > max_pages:
        raise UnusablePdfError(f"has {len(reader.pages)} pages, more than {max_pages}: {_FEWER_PAGES}")
    texts: list[str] = []
    for page in reader.pages:
        texts.append(page.extract_text().replace("\0", "").strip())
        if sum(map(len, texts)) > max_chars:
            raise UnusablePdfError(f"has more than {max_chars} characters: {_FEWER_PAGES}")
    return texts


def page(data: bytes, url: str, charset: str) -> dict[str, object]:
    """Returns the `title` of a web page and its `text` as Markdown with absolute links, or an `error`."""
    from justhtml import Drop, EditAttrs, JustHTML  # noqa: PLC0415 - imported within the limits

    def link_only(node: "Node") -> dict[str, str | None]:
        with suppress(ValueError):  # a link that is no URL
            absolute = urljoin(url, (node.attrs or {}).get("href") or "")
            if node.name == "a" and absolute.startswith(("http://", "https://")):
                return {"href": absolute}
        return {}

    # The Markdown is never rendered as HTML, so nothing is sanitized.
    steps: list[TransformSpec] = [Drop(_NO_TEXT), EditAttrs("*", link_only)]
    try:
        document = JustHTML(data[:MAX_PAGE_BYTES], sanitize=False, encoding=charset or None, transforms=steps)
        title = document.query_one("title")
        return {"title": "" if title is None else title.to_text(), "text": document.to_markdown()}
    except (MemoryError, RecursionError):
        return {"error": "is too complex"}


def confine() -> None:
    """Sets the limits of this process. Beyond its processor time the kernel kills it."""
    os.nice(_NICE)
    for what, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(what)[1]
        low = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (low, low))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)


def main() -> None:
    """Answers for the file on standard input."""
    confine()
    kind, *arguments = sys.argv[1:]
    data = sys.stdin.buffer.read()
    sys.stdout.write(json.dumps(page(data, *arguments) if kind == "page" else extracted(data)))


if __name__ == "__main__":
    main()
