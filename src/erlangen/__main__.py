"""``python -m erlangen``, for ``torchrun -m erlangen``."""

import os
import sys

from erlangen.cli.main import main

if __name__ == "__main__":
    if int(os.environ.get("RANK", "0")):  # one object on stdout is one, however many processes share it
        sys.argv = [argument for argument in sys.argv if argument != "--json"]
    main()
