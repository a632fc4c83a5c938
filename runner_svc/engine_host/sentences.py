"""The pieces in which a long text is spoken: sentences, so that the first one is heard while the others wait."""

import re

MAX_PIECE_CHARS = 400
"""Maximum length of a piece; a longer sentence is cut after a comma or between two words."""
SHORT_CHARS = 24
"""A shorter sentence is spoken together with its neighbour: "Dr. Who", "3. The end" ..."""
MAX_JOINED_CHARS = 120
"""... as long as both together are not longer than this."""
_UNSPOKEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]+")
"""Control characters and halves of surrogate pairs."""
_END = re.compile(
    r"(?<=[.!?\u2026])[\"')\]\u00bb\u201d\u2019]*\s+"  # with a closing quotation mark or bracket
    r"|(?<=[\u3002\uff01\uff1f])"  # marks of Chinese and Japanese, which have no space after them
    r"|\s*\n\s*\n\s*"
)
_CUTS = (re.compile(r"(?<=[,\u060c\u3001\uff0c])\s*"), re.compile(r"\s+"))


def spoken_pieces(text: str) -> list[str]:
    """Returns the text in pieces of at most MAX_PIECE_CHARS, without control characters; none is empty."""
    pieces: list[str] = []
    for sentence in _sentences(_UNSPOKEN.sub(" ", text)):
        last = pieces[-1] if pieces else ""
        is_short = min(len(last), len(sentence)) < SHORT_CHARS and len(last) + len(sentence) < MAX_JOINED_CHARS
        if last and is_short:
            pieces[-1] = f"{last} {sentence}"
        else:
            pieces += _cut(sentence)
    return pieces


def _sentences(text: str) -> list[str]:
    """Returns the sentences, each with the marks that end it."""
    found: list[str] = []
    start = 0
    for end in _END.finditer(text):
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return list(filter(None, found))


def _cut(sentence: str) -> list[str]:
    """Returns a sentence in pieces that are short enough."""
    parts: list[str] = []
    while len(sentence) > MAX_PIECE_CHARS:
        place = next(filter(None, (_last_cut(sentence, cut) for cut in _CUTS)), MAX_PIECE_CHARS)
        parts.append(sentence[:place].strip())
        sentence = sentence[place:].strip()
    return list(filter(None, (*parts, sentence)))


def _last_cut(sentence: str, cut: re.Pattern[str]) -> int:
    """Returns the end of the last place in the first MAX_PIECE_CHARS where it may be cut; 0: there is none."""
    places = [found.end() for found in cut.finditer(sentence, 0, MAX_PIECE_CHARS)]
    return next((place for place in reversed(places) if 0 < place <= MAX_PIECE_CHARS), 0)
