"""Detects repetition loops in an answer. Pure.

Two detectors share one bounded window. The line detector counts consecutive equal lines. The text detector checks
whether the text ends with repeats of one unit, regardless of line breaks; and, less often, by n-grams, whether prose
consists of a few phrases in changing order. Limits are higher for text in which repetition is normal: code, tables,
JSON, rows of figures. Units are compared exactly, so refrains between verses and rows that differ in one cell are not
loops. The detection rates are in docs/agents.md.
"""

import re
import zlib
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

_PROBE_CHARS = 64
"""Length of the text's end that is searched for in earlier text: long enough to be rare, shorter than every limit."""
_MAX_CANDIDATES = 32
"""Earlier matches tried per check; bounds the work on text such as long rules of dashes."""
_SAMPLE_CHARS = 200
_ENUMERATOR = re.compile(r"\s*(?:\d{1,6}[.):]|[-*+•])\s+")
_FENCES = ("```", "~~~")
_STRUCTURE = re.compile(r"[{}\[\]<>|;=\\`]|,\S|\w\(|\t|\n {2,}\S")
"""Marks that are rare in prose: brackets, operators, cells, calls, commas without a space, indented lines."""
_DATA_WORD = re.compile(r"[!-~]{60}")
"""ASCII text of this length without a space is data, such as base64."""
_FIGURE = re.compile(r"[!-~]*\d[!-~]*|\b(?:null|NULL|None|NaN|nan|nil|true|True|false|False)\b")
"""A number, including one with letters such as 0xff, or a word that replaces one in data."""
_DATA_WORD_CHARS = 30
"""Mean word length above which text is data, regardless of where the unit was cut."""
_DENSE_RATIO = 0.10
"""Compression ratio above which text cannot have few n-grams: a cheap check before the expensive one. Prose has 0.4."""


class Texture(IntEnum):
    """The kind of a repeated unit's text, ordered by how often good answers repeat it."""

    PROSE = 0
    STRUCTURED = 1
    """Code, markup, JSON, CSV, text in a fenced block; also units of one or two words."""
    MARKS = 2
    """Mostly digits, punctuation or one short token: table rules, zeros, padding, hex dumps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextureLimits:
    """The limits of repetition for one texture."""

    lines: int
    """Number of consecutive equal lines that make a loop."""
    characters: int
    """Number of characters that repeats of a unit must cover ..."""
    repeats: int
    """... and their minimum number in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionLimits:
    """Limits above which repetition is a loop. Chosen on tests/corpus/repetition; see docs/agents.md."""

    prose: TextureLimits = field(default_factory=lambda: TextureLimits(lines=16, characters=1_200, repeats=5))
    """A chorus, or a line written ten times on request, stays below; looping models repeat thousands of times."""
    structured: TextureLimits = field(default_factory=lambda: TextureLimits(lines=48, characters=3_072, repeats=8))
    """Sample data has dozens of equal rows; an unrolled loop has 32 equal statements."""
    marks: TextureLimits = field(default_factory=lambda: TextureLimits(lines=160, characters=8_192, repeats=16))
    """A matrix of zeros with 50 columns and 50 rows has 7,500 characters."""
    line_characters: int = 12
    """Lines with fewer non-space characters are short ones."""
    short_lines: int = 96
    """Number of consecutive equal short lines of words, outside code and data, that make a loop: `Hi!`, `yes`. Drills
    and lists of answers on request stay below. The text detector covers short lines of figures and marks: `});`,
    `0`."""
    window_characters: int = 16_384
    """Length of the window; also the maximum compared length of a line. Units of up to a fifth of it are detected."""
    check_characters: int = 256
    """Interval of checks: about 64 tokens."""
    ngram_words: int = 5
    """N-gram length for prose: long enough that common phrases do not count."""
    ngram_characters: int = 8_192
    """Window length from which n-grams are counted, and again after every quarter of it."""
    ngram_share: float = 0.05
    """Prose with a smaller share of distinct n-grams is a loop. Prose has 0.9, songs with a refrain 0.4."""

    def of(self, texture: Texture) -> TextureLimits:
        """Returns the limits for a texture."""
        return (self.prose, self.structured, self.marks)[texture]


_USUAL_LIMITS = RepetitionLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A detected loop."""

    kind: Literal["line", "text"]
    """The detector."""
    sample: str
    """The repeated text, at most 200 characters of it."""
    count: int
    """Number of consecutive repeats so far; for the text detector, within the window."""


class RepetitionDetector:
    """The detector of one answer. Its verdict does not depend on how the text is split into chunks."""

    def __init__(self, limits: RepetitionLimits | None = None) -> None:
        self._limits = limits or _USUAL_LIMITS
        self._waiting: list[str] = []
        self._room = self._limits.check_characters
        self._window = ""
        self._lines = _LineRun(self._limits)
        self._seen = 0
        self._done = False

    def feed(self, text: str) -> Repetition | None:
        """Takes the next chunk of the answer. Returns a loop once when it is detected, else None."""
        if text:
            self._waiting.append(text)
            self._room -= len(text)
        return None if self._room > 0 else self._check_blocks()

    def _check_blocks(self) -> Repetition | None:
        step = self._limits.check_characters
        text = "".join(self._waiting)
        self._waiting.clear()
        whole = 0 if self._done else len(text) - len(text) % step
        for start in range(0, whole, step):
            if found := self._check(text[start : start + step]):
                self._done, self._window = True, ""
                break
        rest = "" if self._done else text[whole:]
        if rest:
            self._waiting.append(rest)
        self._room = step - len(rest)
        return found if whole else None

    def _check(self, block: str) -> Repetition | None:
        limits = self._limits
        self._window = (self._window + block)[-limits.window_characters :]
        self._seen += len(block)
        found = self._lines.add(block) or self._repeated_text()
        if found is None and self._seen % (limits.ngram_characters // 4) < limits.check_characters:
            return self._few_phrases()
        return found

    def _repeated_text(self) -> Repetition | None:
        """Returns the shortest unit that is repeated often enough at the end of the window; None: there is none."""
        window = self._window
        end = len(window) - _PROBE_CHARS
        if len(window) < self._limits.prose.characters:
            return None
        probe = window[-_PROBE_CHARS:]
        index = end
        for _ in range(_MAX_CANDIDATES):
            index = window.rfind(probe, 0, index + _PROBE_CHARS - 1)
            if index < 0:
                return None
            period = end - index
            if _is_periodic(window, period, _needed(self._limits.prose, period)):
                # Longer candidates are multiples of this unit, possibly with another texture.
                return self._judge(period)
        return None

    def _judge(self, period: int) -> Repetition | None:
        """Checks whether the unit at the end of the window is repeated often enough for its texture."""
        limits, window = self._limits, self._window
        unit = window[-period:]
        texture = _texture(unit, limits.line_characters, sheltered=self._lines.sheltered)
        needed = _needed(limits.of(texture), period)
        if texture is not Texture.PROSE and not _is_periodic(window, period, needed):
            return None
        return Repetition(kind="text", sample=_sample(unit), count=needed // period)

    def _few_phrases(self) -> Repetition | None:
        """Checks whether the window is prose that consists of a few phrases."""
        limits, window = self._limits, self._window
        if len(window) < limits.ngram_characters or self._lines.sheltered:
            return None
        raw = window.encode("utf-8", "replace")
        if len(zlib.compress(raw, 1)) > _DENSE_RATIO * len(raw):
            return None
        words = window.split()
        ngrams = Counter(zip(*(words[start:] for start in range(limits.ngram_words)), strict=False))
        if not ngrams or len(ngrams) > limits.ngram_share * ngrams.total():
            return None
        if _texture(window, limits.line_characters, sheltered=False) is not Texture.PROSE:
            return None
        ((phrase, count),) = ngrams.most_common(1)
        return Repetition(kind="text", sample=" ".join(phrase)[:_SAMPLE_CHARS], count=count)


class _LineRun:
    """Counts the repeats of the current line."""

    __slots__ = ("_count", "_fence", "_is_json", "_last", "_limits", "_needed", "_partial")

    def __init__(self, limits: RepetitionLimits) -> None:
        self._limits = limits
        self._partial = ""
        self._last = ""
        self._count = 0
        self._needed = 0
        self._fence = ""
        self._is_json: bool | None = None

    @property
    def sheltered(self) -> bool:
        """Whether the text is inside a fenced block, or the whole answer is a JSON document."""
        return bool(self._fence or self._is_json)

    def add(self, block: str) -> Repetition | None:
        """Takes the next block; its last line may be incomplete."""
        first, *rest = block.split("\n")
        # Only the beginning of lines longer than the window is compared.
        self._partial = (self._partial + first)[: self._limits.window_characters]
        for line in rest:
            if found := self._finish_line(self._partial):
                return found
            self._partial = line
        return None

    def _finish_line(self, raw: str) -> Repetition | None:
        line = raw.strip()
        if not line:
            return None
        if self._is_json is None:
            self._is_json = line[0] in "{["
        self._follow_fence(line)
        line = line[mark.end() :] if (mark := _ENUMERATOR.match(line)) else line
        if line != self._last:
            self._begin(line)
            return None
        self._count += 1
        if self._count < self._needed:
            return None
        return Repetition(kind="line", sample=line[:_SAMPLE_CHARS], count=self._count)

    def _begin(self, line: str) -> None:
        self._last, self._count = line, 1
        solid = len(line) - line.count(" ")
        if solid < self._limits.line_characters:
            self._begin_short(line, solid)
            return
        texture = _texture(line, self._limits.line_characters, sheltered=self.sheltered)
        self._needed = self._limits.of(texture).lines

    def _begin_short(self, line: str, solid: int) -> None:
        letters = sum(map(str.isalpha, _FIGURE.sub("", line)))
        if self.sheltered or letters * 2 < solid or _STRUCTURE.search(line):
            self._last, self._count = "", 0
        else:
            self._needed = self._limits.short_lines

    def _follow_fence(self, line: str) -> None:
        mark = line[:3]
        if mark not in _FENCES:
            return
        if not self._fence:
            self._fence = mark
        elif self._fence == mark:
            self._fence = ""


def _needed(limits: TextureLimits, period: int) -> int:
    """Returns the length, in whole units, that repeats of a unit of `period` characters must cover."""
    return period * max(limits.repeats, -(-limits.characters // period))


def _sample(unit: str) -> str:
    """Rotates a repeated unit to start at a line, sentence or word, because its cut is arbitrary."""
    for mark in ("\n", ". ", " "):
        head, found, rest = unit.partition(mark)
        if found:
            return (rest + head + mark).strip()[:_SAMPLE_CHARS]
    return unit[:_SAMPLE_CHARS]


def _is_periodic(window: str, period: int, length: int) -> bool:
    """Whether the last `length` characters repeat every `period`; compares the last repeat first."""
    if length > len(window) or window[-period:] != window[-2 * period : -period]:
        return False
    return window[-length:-period] == window[-length + period :]


def _texture(piece: str, short: int, *, sheltered: bool) -> Texture:
    """Returns the texture of `piece`; a piece with fewer than `short` non-space characters is not a sentence."""
    words = piece.split()
    solid = "".join(words)
    letters = sum(map(str.isalpha, _FIGURE.sub("", piece)))
    unbroken = len(solid) == len(piece) and piece.isascii()
    data = (unbroken and len(piece) < short) or len(set(solid)) == 1 or _DATA_WORD.search(piece) is not None
    long_words = piece.isascii() and len(solid) >= _DATA_WORD_CHARS * len(words)
    if data or long_words or letters * 2 < len(solid):
        return Texture.MARKS
    if sheltered or unbroken or len(solid) < short or letters * 10 < len(solid) * 7 or _STRUCTURE.search(piece):
        return Texture.STRUCTURED
    return Texture.PROSE
