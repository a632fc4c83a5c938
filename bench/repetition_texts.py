"""Made-up texts for the corpus of bench/repetition.py: repetition that is right, and loops, all from fixed seeds.

    python -m bench.repetition_texts

writes them to tests/corpus/repetition as made-*.txt. The answers of a real model beside them come from
bench.repetition_record.
"""

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus" / "repetition"
Maker = Callable[[random.Random], str]

_NOUNS = (
    "river", "garden", "engine", "letter", "mountain", "window", "teacher", "harbour", "market", "lantern", "orchard",
    "railway", "captain", "village", "library", "bridge", "meadow", "kitchen", "station", "compass",
)  # fmt: skip
_VERBS = (
    "keeps", "finds", "carries", "watches", "builds", "remembers", "opens", "follows", "mends", "paints", "leaves",
    "greets",
)  # fmt: skip
_ADJECTIVES = (
    "old", "quiet", "green", "narrow", "bright", "distant", "heavy", "gentle", "broken", "early", "golden", "empty",
)  # fmt: skip
_CITIES = ("Lisbon", "Oslo", "Lyon", "Cork", "Graz", "Turin")


def sentence(rng: random.Random) -> str:
    """A sentence of common words."""
    words = [rng.choice(_ADJECTIVES), rng.choice(_NOUNS), rng.choice(_VERBS), "the", rng.choice(_ADJECTIVES)]
    return f"The {' '.join(words)} {rng.choice(_NOUNS)}."


def paragraph(rng: random.Random, sentences: int = 5) -> str:
    """Some sentences."""
    return " ".join(sentence(rng) for _ in range(sentences))


def prose(rng: random.Random) -> str:
    """Paragraphs."""
    return "\n\n".join(paragraph(rng, rng.randint(4, 9)) for _ in range(rng.randint(4, 14)))


def refrain(rng: random.Random) -> str:
    """A song whose chorus comes back after each verse, its last line three times."""
    chorus = [sentence(rng) for _ in range(3)]
    verses = ("\n".join(sentence(rng) for _ in range(4)) for _ in range(10))
    return "\n\n".join(f"{verse}\n\n" + "\n".join([*chorus, chorus[-1], chorus[-1]]) for verse in verses)


def mantra(rng: random.Random) -> str:
    """A line written ten times because somebody asked for that, with words around it."""
    return f"Here it is, ten times:\n\n{(sentence(rng) + chr(10)) * 10}\nThat was ten times. {paragraph(rng)}"


def laughter(rng: random.Random) -> str:
    """Laughing for as long as was asked."""
    return f"{'ha ' * rng.randint(100, 300)}\n\n{paragraph(rng)}\n{'la la la ' * 60}"


def markdown_table(rng: random.Random) -> str:
    """A table with rules, empty cells and equal cells."""
    rows = [f"| {rng.choice(_NOUNS):<10} | {rng.randint(0, 3)} |   |   |" for _ in range(40)]
    blank = "|            |   |   |   |"
    return "\n".join(["| name | a | b | c |", "|------|---|---|---|", *rows, *[blank] * 30])


def ruled_table(rng: random.Random) -> str:
    """A table with a rule under each row."""
    rule = "+" + "+".join("-" * 14 for _ in range(5)) + "+"
    rows = ("|" + "|".join(f" {rng.choice(_NOUNS):<13}" for _ in range(5)) + "|" for _ in range(40))
    return "\n".join(f"{rule}\n{row}" for row in rows)


def json_objects(rng: random.Random) -> str:
    """An array of objects, most of them equal."""
    items = [{"name": "", "enabled": False, "tags": [], "limit": 0} for _ in range(24)]
    items[rng.randrange(24)]["name"] = rng.choice(_NOUNS)
    return json.dumps(items, indent=2)


def json_in_prose(rng: random.Random) -> str:
    """The same between sentences, without a fence, one object per line."""
    row = '  {"city": "Lisbon", "open": true, "count": 0},\n'
    return f"{paragraph(rng)}\n\n[\n{row * 40}]\n\n{paragraph(rng)}"


def csv_zeros(rng: random.Random) -> str:
    """Rows of zeros, now and then another number."""
    return "\n".join("0,0,0,0,0,0,0,0" if rng.random() < 0.97 else f"0,{rng.randint(1, 9)},0,0" for _ in range(200))


def csv_rows(rng: random.Random) -> str:
    """Sample data with many equal rows."""
    kinds = [f"{city},{rng.choice(_NOUNS)},open,standard" for city in _CITIES[:2]]
    return "city,thing,state,tariff\n" + "\n".join(kinds[0] if n % 44 else kinds[1] for n in range(120))


def matrix(rng: random.Random) -> str:
    """Zeros with a diagonal."""
    size = rng.randint(20, 40)
    rows = (" ".join("1" if row == column else "0" for column in range(size)) for row in range(size))
    return "\n".join(rows)


def zeros(rng: random.Random) -> str:
    """A list of zeros in code."""
    return f"```python\nboard = [{', '.join(['0'] * rng.randint(500, 2000))}]\n```\n{paragraph(rng)}"


def code_braces(rng: random.Random) -> str:
    """Nested code that closes."""
    depth = rng.randint(20, 60)
    opening = (f"{'    ' * level}if (a{level}) {{" for level in range(depth))
    closing = ("    " * level + "}" for level in reversed(range(depth)))
    return "```c\n" + "\n".join([*opening, *closing]) + "\n```"


def code_unrolled(rng: random.Random) -> str:
    """An unrolled loop and a list of equal statements."""
    return (
        f"```c\n{'    total += *cursor++;' + chr(10)}{('    total += *cursor++;' + chr(10)) * 31}```\n{paragraph(rng)}"
    )


def code_unfenced(rng: random.Random) -> str:
    """Equal statements without a fence."""
    lines = ['    client.get("/health")\n' * 30, "    time.sleep(0.5)\n" * 20]
    return f"def test_{rng.choice(_NOUNS)}(client):\n{''.join(lines)}"


def assembly(rng: random.Random) -> str:
    """A slide of nops between other instructions."""
    return "```asm\n" + "    nop\n" * rng.randint(60, 200) + "    mov eax, 1\n    ret\n```"


def html_table(rng: random.Random) -> str:
    """Rows of empty cells."""
    row = "  <tr>" + "<td></td>" * rng.randint(6, 9) + "</tr>\n"
    return f"<table>\n  <caption>{sentence(rng)}</caption>\n{row * rng.randint(20, 40)}</table>\n"


def svg(rng: random.Random) -> str:
    """Shapes that differ in a number."""
    return "<svg>\n" + "\n".join(f'  <circle cx="{n * 10}" cy="10" r="4"/>' for n in range(rng.randint(50, 150)))


def hex_dump(rng: random.Random) -> str:
    """Mostly zeros."""
    line = " ".join(["0000"] * 8)
    return "\n".join(f"{n * 16:08x}: {line}" for n in range(rng.randint(60, 150))) + "\n" + (line + "\n") * 100


def base64_text(rng: random.Random) -> str:
    """Random bytes with padding of zeros."""
    data = rng.randbytes(900) + bytes(3000) + rng.randbytes(300)
    return base64.encodebytes(data).decode() + "\n" + base64.b64encode(data).decode()


def log_lines(rng: random.Random) -> str:
    """A log in which little happens."""
    lines = (f"2026-03-0{n // 60 % 9 + 1} 12:{n % 60:02}:00 INFO health check passed" for n in range(200))
    return "\n".join(lines) + f"\n{paragraph(rng)}"


def test_report(rng: random.Random) -> str:
    """Tests that pass."""
    return "\n".join(f"tests/test_{rng.choice(_NOUNS)}.py::test_case_{n} PASSED" for n in range(150))


def multiplication(rng: random.Random) -> str:
    """Tables to learn by heart."""
    low = rng.randint(2, 8)
    return "\n".join(f"{a} x {b} = {a * b}" for a in range(low, low + 8) for b in range(1, 13))


def numbers(rng: random.Random) -> str:
    """Counting."""
    step = rng.randint(1, 7)
    return ", ".join(str(n * step) for n in range(1500))


def digits(rng: random.Random) -> str:
    """A fraction whose period is short, to 2,000 places."""
    return f"1/7 = 0.{'142857' * 330}... {paragraph(rng)}"


def ascii_art(rng: random.Random) -> str:
    """A chess board and a box."""
    board = ("# . " * 16 + "\n" + ". # " * 16 + "\n") * 10
    return f"{board}\n+{'-' * 200}+\n" + f"|{' ' * 200}|\n" * 12 + f"+{'-' * 200}+\n{sentence(rng)}"


def licences(rng: random.Random) -> str:
    """The same header over four files."""
    header = "\n".join(f"# {paragraph(rng, 2)}" for _ in range(4))
    return "\n\n".join(f"## {rng.choice(_NOUNS)}{n}.py\n{header}\n{paragraph(rng)}" for n in range(12))


def dialogue(rng: random.Random) -> str:
    """Two who say the same often, never the same exchange."""
    return "\n".join(f"A: {sentence(rng)}\nB: Yes, I think so too." for _ in range(60))


def checklist(rng: random.Random) -> str:
    """Items that begin alike."""
    return "\n".join(f"- [ ] Check that the {rng.choice(_NOUNS)} of room {n} is closed" for n in range(90))


def schedule(rng: random.Random) -> str:
    """A week in which each day is alike."""
    day = "\n".join(f"- {hour:02}:00 {rng.choice(_NOUNS)}" for hour in range(8, 18))
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
    return "\n\n".join(f"### {name}\n\n{day}" for name in days)


def fixtures(rng: random.Random) -> str:
    """YAML with equal blocks."""
    block = "  - kind: sample\n    enabled: true\n    retries: 3\n    timeout: 30\n"
    return f"# {sentence(rng)}\nitems:\n{block * 30}"


def spanish_verbs(rng: random.Random) -> str:
    """A drill: the same sentence with one word changed."""
    return "\n".join(f"Ayer yo {word}aba con mi amigo en la plaza." for word in rng.sample(_VERBS * 5, 50))


def chinese(rng: random.Random) -> str:
    """Text without spaces, with a line that comes back."""
    signs = "山水風雨花鳥魚月日天地人心手口目耳木火土金石田雲雪星海河"
    lines = ["".join(rng.choices(signs, k=14)) + "。" for _ in range(120)]
    return "\n".join(line if n % 5 else "明月幾時有把酒問青天不知天上宮闕。" for n, line in enumerate(lines))


LEGITIMATE: tuple[Maker, ...] = (
    prose, refrain, mantra, laughter, markdown_table, ruled_table, json_objects, json_in_prose, csv_zeros, csv_rows,
    matrix, zeros, code_braces, code_unrolled, code_unfenced, assembly, html_table, svg, hex_dump, base64_text,
    log_lines, test_report, multiplication, numbers, digits, ascii_art, licences, dialogue, checklist, schedule,
    fixtures, spanish_verbs, chinese,
)  # fmt: skip


def same_line(rng: random.Random) -> str:
    """One line, again and again."""
    return f"{paragraph(rng)}\n\n" + (sentence(rng) + "\n") * 200


def same_line_spaced(rng: random.Random) -> str:
    """The same with blank lines between."""
    return f"{prose(rng)}\n\n" + (sentence(rng) + "\n\n") * 200


def same_sentence(rng: random.Random) -> str:
    """One sentence without line breaks."""
    return f"{paragraph(rng)} " + (sentence(rng) + " ") * 250


def same_paragraph(rng: random.Random) -> str:
    """A paragraph."""
    return f"{paragraph(rng)}\n\n" + (paragraph(rng, 8) + "\n\n") * 25


def line_cycle(rng: random.Random) -> str:
    """A cycle of several lines."""
    cycle = "\n".join(sentence(rng) for _ in range(rng.randint(2, 12))) + "\n"
    return paragraph(rng) + "\n" + cycle * (12_000 // len(cycle))


def same_item(rng: random.Random) -> str:
    """A numbered list whose items are equal."""
    item = sentence(rng)
    return "\n".join(f"{n}. {item}" for n in range(1, 200))


def same_words(rng: random.Random) -> str:
    """Two words."""
    return paragraph(rng) + f" {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}" * 900


def same_word(rng: random.Random) -> str:
    """One word."""
    return paragraph(rng) + f" {rng.choice(_NOUNS)}" * 1800


def same_statement(rng: random.Random) -> str:
    """A statement in a fenced block."""
    return f"```python\n# {sentence(rng)}\n" + '    print("The value is", value)\n' * 300


def same_function(rng: random.Random) -> str:
    """A whole function in a fenced block."""
    name = rng.choice(_NOUNS)
    body = f"def {name}(value):\n    if value is None:\n        return None\n    return {name}(value - 1)\n\n\n"
    return f"```python\n{body * 120}"


def same_object(rng: random.Random) -> str:
    """A JSON document that does not end."""
    row = f'  {{"name": "{rng.choice(_NOUNS)}", "city": "{rng.choice(_CITIES)}", "count": {rng.randint(1, 99)}}},\n'
    return "[\n" + row * 250


def same_row(rng: random.Random) -> str:
    """A table row."""
    return (
        "| name | place | note |\n|---|---|---|\n" + f"| {rng.choice(_NOUNS)} | {rng.choice(_CITIES)} | none |\n" * 300
    )


def same_tag(rng: random.Random) -> str:
    """Markup."""
    return f"<ul>\n{f'  <li>{sentence(rng)}</li>' + chr(10)}" * 1 + f"  <li>{sentence(rng)}</li>\n" * 250


def exclamations(rng: random.Random) -> str:
    """One sign."""
    return paragraph(rng) + "!" * 12_000


def counted(rng: random.Random) -> str:
    """Lines that differ in a number inside: exact comparison does not see it."""
    tail = sentence(rng)
    return "\n".join(f"In step {n} we see that {tail.lower()}" for n in range(1, 250))


def drifting(rng: random.Random) -> str:
    """Sentences of a few words in changing order: no exact period."""
    few = [sentence(rng) for _ in range(4)]
    return " ".join(rng.choice(few) for _ in range(300))


def chinese_loop(rng: random.Random) -> str:
    """Text without spaces."""
    return "".join(rng.choices("山水風雨花鳥魚月日天", k=60)) + "".join(rng.choices("地人心手口目耳木火土", k=22)) * 400


LOOPING: tuple[Maker, ...] = (
    same_line, same_line_spaced, same_sentence, same_paragraph, line_cycle, same_item, same_words, same_word,
    same_statement, same_function, same_object, same_row, same_tag, exclamations, counted, drifting, chinese_loop,
)  # fmt: skip


def texts() -> Iterator[tuple[Path, str]]:
    """Every made text and its file below the corpus; each kind twice with other seeds."""
    for folder, makers in (("legitimate", LEGITIMATE), ("looping", LOOPING)):
        for maker in makers:
            for variant in (1, 2):
                rng = random.Random(f"{maker.__name__}-{variant}")  # noqa: S311 - the same text each time
                name = maker.__name__.replace("_", "-")
                yield Path(folder) / f"made-{name}-{variant}.txt", maker(rng)


def main() -> None:
    """Write them."""
    for path, text in texts():
        target = CORPUS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
