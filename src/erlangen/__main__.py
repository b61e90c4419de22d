"""``python -m erlangen``, for ``torchrun -m erlangen``."""

from erlangen.cli.main import main

if __name__ == "__main__":
    main()
