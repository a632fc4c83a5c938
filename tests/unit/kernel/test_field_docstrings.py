"""Descriptions of fields, read from the docstrings below them."""

from weft.documents.document_base import field_docstrings


class Base:
    """Two fields with docstrings."""

    width: int
    """How wide it is,
    in metres."""
    height: int
    """How high it is."""


class Derived(Base):
    """One of the fields again, without a docstring."""

    height: int
    depth: int
    """How deep it is."""
    weight: int = 0


def test_fields_include_docstrings_below_them_and_those_of_bases() -> None:
    assert field_docstrings(Base) == {"width": "How wide it is,\nin metres.", "height": "How high it is."}
    assert field_docstrings(Derived) == {"width": "How wide it is,\nin metres.", "depth": "How deep it is."}


def test_class_without_source_has_no_docstrings() -> None:
    assert field_docstrings(int) == {}
    assert field_docstrings(type("Made", (), {"__module__": "_io"})) == {}
