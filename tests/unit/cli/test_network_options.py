"""The options of `weft up` that say how the mesh is reached."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft_app.cli.network_options import NetworkOptions, TlsChoice


def test_plain_http_and_certificate_conflict_error_names_both_options_and_a_remedy() -> None:
    """It was said that --insecure excludes a certificate in gateway.tls, a setting that nobody had typed."""
    with pytest.raises(FieldError) as refused:
        NetworkOptions(host="0.0.0.0", insecure=True, tls=TlsChoice.AUTO).overrides()
    assert refused.value.message == (
        "--insecure: cannot be combined with --tls auto: omit --insecure for HTTPS with the mesh's certificate, "
        "or --tls for plain HTTP"
    )


@pytest.mark.parametrize("options", [NetworkOptions(insecure=True), NetworkOptions(tls=TlsChoice.AUTO)])
def test_plain_http_or_certificate_is_accepted_separately(options: NetworkOptions) -> None:
    assert "gateway" in options.overrides()
