"""A connection in clear believes nobody's certificate; any other believes the named authority, or the system's."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from labeler.system.http_client import certificates_for


def test_for_plain_http_nobody_is_believed_and_everybody_would_be_checked() -> None:
    found = certificates_for("http", None)
    assert found.get_ca_certs() == []
    assert found.verify_mode is ssl.CERT_REQUIRED
    assert found.check_hostname


def test_for_https_it_is_the_systems_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    make = ssl.create_default_context

    def noting(*, cafile: str | None) -> ssl.SSLContext:
        asked.append(cafile)
        return make(cafile=cafile)

    monkeypatch.setattr(ssl, "create_default_context", noting)
    assert certificates_for("https", None).verify_mode is ssl.CERT_REQUIRED
    assert asked == [None]


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_file_that_holds_no_certificates_is_an_error_whatever_the_scheme(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name, said in (("ca.pem", "certificate"), ("none.pem", "No such file")):
        with pytest.raises(OSError, match=said):
            certificates_for(scheme, str(tmp_path / name))
