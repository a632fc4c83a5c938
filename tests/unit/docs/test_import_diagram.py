"""The diagram of imports in CONTRIBUTING.md."""

from collections import Counter

from import_diagram import END, PAGE, diagram, imports


def test_diagram_has_the_arrows_of_the_imports_and_no_other() -> None:
    drawn = PAGE.read_text().partition("flowchart TD\n")[2].partition("```")[0]
    arrows = {(line.split()[0], line.split()[-1]) for line in drawn.splitlines()}
    assert arrows == set(imports()), "`make docs` draws it again"
    assert END in PAGE.read_text()


def test_an_arrow_has_the_number_of_importing_modules() -> None:
    assert "  gateway -->|3| weft\n" in diagram(Counter({("gateway", "weft"): 3}))
