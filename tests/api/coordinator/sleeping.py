"""Stands for a process that chooses for long: it says that it began, and waits."""

import os
import sys
import time
from pathlib import Path

(Path(sys.argv[1]) / "began.part").write_text(str(os.getpid()))
(Path(sys.argv[1]) / "began.part").rename(Path(sys.argv[1]) / "began")
time.sleep(600)
