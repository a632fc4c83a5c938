"""Selectors of labels: what they select, and what is refused."""

import pytest

from weft.api.registry.v1.tags_pb2 import Tags
from weft.documents.selectors import MAX_REQUIREMENTS, parse_selector, require_labels, selects
from weft.kernel.errors.error_tree import FieldError

TAGS = Tags(tier="fast", labels={"team": "a", "zone": "x=1"}, owner="ann")


@pytest.mark.parametrize(
    ("text", "is_selected"),
    [
        ("", True),
        ("  ", True),
        ("tier=fast", True),
        ("tier==fast", True),
        ("tier=fast,team=a", True),
        ("tier=fast, team=b", False),
        ("tier=Fast", False),
        ("tier!=heavy,owner=ann", True),
        ("team!=a", False),
        ("team", True),
        ("!team", False),
        ("!gone", True),
        ("gone!=b", True),
        ("zone=x=1", True),
        ("owner", True),
        ("!owner", False),
    ],
)
def test_selector_matches_if_all_its_parts_match(text: str, is_selected: bool) -> None:
    assert selects(parse_selector(text, "labels"), TAGS) is is_selected


@pytest.mark.parametrize(
    "text",
    [
        "=fast",
        "tier=",
        "team=a,",
        ",",
        "te am=a",
        "team=a b",
        "!",
        "!=a",
        "team~a",
        "x" * 3000,
        "a," * MAX_REQUIREMENTS + "a",
    ],
)
def test_invalid_selector_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(FieldError) as refused:
        parse_selector(text, "labels")
    assert refused.value.field == "labels"


@pytest.mark.parametrize(("key", "value"), [("tier", "fast"), ("owner", "ann"), ("team", "")])
def test_label_that_no_selector_could_match_is_refused(key: str, value: str) -> None:
    require_labels(TAGS, "labels")
    with pytest.raises(FieldError) as refused:
        require_labels(Tags(labels={"zone": "b", key: value}), "labels")
    assert refused.value.field == f"labels[{key}]"
