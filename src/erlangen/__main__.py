"""``python -m erlangen``, for ``torchrun -m erlangen``."""

import logging
import os
import sys

from erlangen.cli.main import main


def as_worker() -> int:
    """`main` in one of several processes; the exit code."""
    if int(os.environ.get("RANK", "0")):  # one object on stdout is one, however many processes share it
        sys.argv = [argument for argument in sys.argv if argument != "--json"]
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        main()
    else:
        # A split model holds its process group, whose threads then outlive it. One that asks for the interpreter's lock while
        # Python is being torn down aborts the process, and a run that is over and written would count as lost.
        code = as_worker()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
