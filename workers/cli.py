"""The `labeler` command line: the one place that may import everything, and wires it.

The commands live in `workers.commands`, one module per room, loaded when one of its commands is invoked
(`workers.commands.catalog`). Here their errors become sentences and exit codes: 0 done, 1 failed, 2 wrong usage or
setting, 75 try again (an interrupted run continues). Nothing else is imported before `main` handles Ctrl-C.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line and end with its exit code."""
    try:
        from workers.commands import ended_at_once
    except KeyboardInterrupt:
        sys.stderr.write("labeler: interrupted\n")
        sys.exit(75)
    with ended_at_once():
        _run()


def _run() -> None:
    import errno
    import io

    from labeler.errors import InvalidSetting, LabelerError, NotThere, StorageFull
    from workers.commands.catalog import app

    # A package that extends pydantic sees all that is validated, and some send it away as telemetry. To find such
    # packages, every start would search all that is installed.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise nobody reads the stream
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter still gets the rest
    # Undecodable bytes come as halves of surrogate pairs, which no library writes.
    if any("\ud800" <= letter <= "\udfff" for argument in sys.argv for letter in argument):
        _complain("an argument is not UTF-8; rename that file in UTF-8, because tables and manifests hold names")
        sys.exit(InvalidSetting.exit_code)
    try:
        app()
    except LabelerError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        # For a copy, the second name is its destination.
        name = error.filename2 or error.filename or "a file"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _complain(f"cannot write {name}: {error.strerror}. Make room, then give the same command again")
            sys.exit(StorageFull.exit_code)
        _complain(f"cannot read or write {name}: {error.strerror or error}")
        sys.exit(NotThere.exit_code if isinstance(error, FileNotFoundError) else LabelerError.exit_code)


def _complain(sentence: str) -> None:
    from workers.commands.console import complain

    complain(sentence)


if __name__ == "__main__":
    main()
