"""The suites of this folder run over fake devices as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feature_store.index.exact_index import EngineFault, ExactIndex
from tests.feature_store.index.fake_devices import fakes_have_names


@pytest.fixture(autouse=True, scope="module")
def _fake_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """No index may leave its engine for numpy, whose neighbors are right: but where that is what is tested."""

    def left(_: ExactIndex, fault: EngineFault) -> None:
        pytest.fail(f"the index left its engine: {fault}")

    with fakes_have_names(), pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_devices":
            patch.setattr(ExactIndex, "_leave_engine", left)
        yield
