"""A command of `labeler` as a child that ends with whoever started it, however that one ends.

For programs that run a whole federation for a while, such as benches: killed with SIGKILL they cannot stop it, and nine
processes would stay. On Linux the child asks the kernel to kill it when its parent's thread ends
(`workers.federation.supervisor.die_with_parent`), before it loads anything; what it has started itself ends with it
in turn.
The child asks, and no hook between fork and exec does it, because the parent may have threads by then.
"""

from __future__ import annotations

import os
import sys

_PROGRAM = (
    "import sys; from workers.federation.supervisor import die_with_parent; "
    "ask_the_kernel = die_with_parent(int(sys.argv.pop(1))); ask_the_kernel and ask_the_kernel(); "
    "from workers.cli import main; main()"
)


def tied_command(*arguments: object) -> list[str]:
    """What to give to `subprocess`, in the thread that the child shall not outlive.

    Args:
        arguments: of the command line, without the program.
    """
    return [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), *map(str, arguments)]
