"""The `labeler` command line: the one place that may import everything, and wires it.

The commands live in `workers.commands`, one module per room; here they are put together and their errors become
sentences and exit codes: 0 done, 1 failed, 2 wrong usage or setting, 75 try again (an interrupted run continues).
"""

from __future__ import annotations

import sys

import typer

from labeler.errors import Interrupted, LabelerError
from workers.commands import bench, client, federation, jobs, journal, keys, parties, prices, prune, roles, shards
from workers.commands.console import complain

app = typer.Typer(
    name="labeler",
    help="Label public images with the private images of several organisations, under a proven privacy bound.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

for room in (jobs, bench, prices, shards, federation, client, roles, parties, keys, journal, prune):
    room.register(app)


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        app()
    except LabelerError as error:
        complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        complain(f"cannot read or write {error.filename or 'a file'}: {error.strerror or error}")
        sys.exit(1)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(Interrupted.exit_code)


if __name__ == "__main__":
    main()
