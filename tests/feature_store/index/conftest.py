"""The suites of this folder run over fake devices as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.feature_store.index.fake_devices import fakes_have_names


@pytest.fixture(autouse=True, scope="module")
def _fake_devices() -> Iterator[None]:
    with fakes_have_names():
        yield
