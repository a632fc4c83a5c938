"""Functions that print to standard output and standard error. Other modules of the command line must use them.

Texts of models, engines and other machines may contain control characters that move a terminal's cursor, change its
title or write its clipboard. These functions replace them by spaces.
"""

import re
import sys
from collections.abc import Iterable
from unicodedata import category

BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
GREEN, YELLOW, RED = "\x1b[32m", "\x1b[33m", "\x1b[31m"
_CLEAR_LINE = "\r\x1b[K"
_OWN_STYLE = re.compile(f"({'|'.join(map(re.escape, (BOLD, DIM, PLAIN, GREEN, YELLOW, RED)))})")


def safe_text(text: str) -> str:
    """Returns text as one line without control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def shown(text: str) -> str:
    """Replaces control characters other than line breaks and tabs by spaces."""
    return "".join(character if character in "\n\t" or category(character) != "Cc" else " " for character in text)


def is_out_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def is_err_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


def say(text: str) -> None:
    """Prints to standard output, and flushes: a file or pipe would get it only when the program ends.

    On a terminal, only weft's own styles take effect; other control characters become spaces.
    """
    if is_out_terminal():
        text = "".join(part if index % 2 else shown(part) for index, part in enumerate(_OWN_STYLE.split(text)))
    sys.stdout.write(text)
    sys.stdout.flush()


def say_answer(text: str) -> None:
    """Prints the text of a model to standard output, unchanged except for control characters on a terminal."""
    sys.stdout.write(shown(text) if is_out_terminal() else text)
    sys.stdout.flush()


def say_bytes(parts: Iterable[bytes]) -> None:
    """Writes the content of a file to standard output."""
    sys.stdout.buffer.writelines(parts)
    sys.stdout.buffer.flush()


def tell(text: str, style: str = "") -> None:
    """Prints to standard error, with a style on a terminal."""
    text = shown(text)
    sys.stderr.write(f"{style}{text.removesuffix(chr(10))}{PLAIN}\n" if style and is_err_terminal() else text)
    sys.stderr.flush()


def note(text: str) -> None:
    """Prints a note for the user on standard error."""
    tell(f"weft: {text}\n")


def rewrite(text: str) -> None:
    """Replaces the current line of standard error, which must be a terminal."""
    sys.stderr.write(f"{_CLEAR_LINE}{safe_text(text)}")
    sys.stderr.flush()


def close_err() -> None:
    """Closes standard error, so that nothing more is printed there."""
    sys.stderr.close()
