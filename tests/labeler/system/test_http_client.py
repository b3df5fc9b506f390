"""A client believes the authority that it was given, or the system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from labeler.system.http_client import http_client


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_file_that_holds_no_certificates_is_an_error_whatever_the_scheme(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name, said in (("ca.pem", "certificate"), ("none.pem", "No such file")):
        with pytest.raises(OSError, match=said):
            http_client(f"{scheme}://127.0.0.1", ca_file=str(tmp_path / name), read_s=1.0)
