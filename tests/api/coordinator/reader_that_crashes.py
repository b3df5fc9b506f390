"""A reader that a file has brought down."""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSEGV)
