"""`python -m kvasir.entrypoints.openai.api_server --model MODEL ...` is `kvasir serve MODEL ...`."""

from __future__ import annotations

import sys

from kvasir.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
