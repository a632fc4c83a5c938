"""Who owns a model or an agent after a declaration, and who may say so."""

import pytest

from registry_svc.mesh.policy.declarations import Author, settled_owner
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason

ANY, OWN = Author(name="key:ann"), Author(name="key:ann", own_only=True)


@pytest.mark.parametrize(
    ("author", "given", "earlier", "after"),
    [
        (OWN, "", None, "key:ann"),
        (OWN, "key:ann", None, "key:ann"),
        (OWN, "", "", ""),
        (OWN, "", "key:bob", "key:bob"),
        (OWN, "key:bob", "key:bob", "key:bob"),
        (OWN, "key:bob", "key:ann", "key:bob"),
        (ANY, "key:bob", None, "key:bob"),
        (ANY, "key:ann", "key:bob", "key:ann"),
        (Author(), "", None, ""),
        (Author(), "team-a", "", "team-a"),
    ],
)
def test_new_resource_belongs_to_its_creator_and_an_unset_owner_changes_nothing(
    author: Author, given: str, earlier: str | None, after: str
) -> None:
    assert settled_owner(given, author, earlier=earlier, field="owner") == after


@pytest.mark.parametrize(
    ("given", "earlier"), [("key:bob", None), ("key:ann", "key:bob"), ("key:ann", ""), ("key:cid", "key:bob")]
)
def test_author_with_own_scope_cannot_take_over_a_resource(given: str, earlier: str | None) -> None:
    assert settled_owner(given, ANY, earlier=earlier, field="owner") == given, "whoever may edit every model may"
    with pytest.raises(FieldError) as refused:
        settled_owner(given, OWN, earlier=earlier, field="owner")
    assert (refused.value.reason, refused.value.field) == (Reason.PERMISSION_DENIED, "owner")
    assert "models:edit" in refused.value.message
