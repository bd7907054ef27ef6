"""Runs `kvasir serve` as `python -m kvasir.entrypoints.openai.api_server --model MODEL ...`, like vLLM."""

from __future__ import annotations

import sys

from kvasir.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
