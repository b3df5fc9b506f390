"""The digits that are dealt are scikit-learn's, read without loading it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from sklearn import datasets

from workers.digits import DIGITS, load_digits

ROOT = Path(__file__).parent.parent.parent


def test_they_are_the_digits_of_scikit_learn() -> None:
    images, targets = load_digits()
    theirs = datasets.load_digits()
    assert images.shape == (DIGITS, 8, 8)
    np.testing.assert_array_equal(images, theirs.images)
    np.testing.assert_array_equal(targets, theirs.target)


def test_making_a_federation_of_them_loads_no_learning_library(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from workers.up.home import make_federation\n"
        "from workers.up import Plan\n"
        "make_federation(Path(sys.argv[1]), Plan(agents=2))\n"
        "print(*sorted({'sklearn', 'torch', 'faiss', 'timm', 'matplotlib', 'scipy.optimize'} & set(sys.modules)))\n"
    )
    tmp_path.chmod(0o700)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert ended.stdout.split() == []
