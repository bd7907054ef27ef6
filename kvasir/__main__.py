"""`python -m kvasir`: the same as the command `kvasir`."""

import sys

from kvasir.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
