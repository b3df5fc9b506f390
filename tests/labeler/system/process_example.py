"""A program that tests start in a separate process: it says what it finds, and then obeys."""

import json
import os
import sys
import time
from pathlib import Path

from labeler.system.process_pool import bound_process, write_frame

how = sys.argv[1]
handles = sorted(int(one.name) for one in Path("/proc/self/fd").iterdir())
bound_process(2**28 if how == "fills its memory" else 2**40, 1 if how == "takes a processor" else None)
found = {"pid": os.getpid(), "given": sys.stdin.read(), "environment": dict(os.environ), "handles": handles}
with open(1, "wb", closefd=False) as answer:
    write_frame(answer, found, b"pixels")
    match how:
        case "fills its memory":
            held = [bytes(2**24) for _ in range(64)]
        case "takes a processor":
            while True:
                json.dumps(found)
        case "hangs":
            time.sleep(600)
        case "lies":
            answer.write(b"\xff\xff\xff\xff")
        case "says no object":
            answer.write(b"\x00\x00\x00\x02[]")
