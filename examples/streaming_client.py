"""Streams an answer from a server with OpenAI's client (pip install openai).

usage: python examples/streaming_client.py [--url http://127.0.0.1:8000/v1] [QUESTION]
Start a server first: kvasir serve
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("question", nargs="?", default="Why is the sky blue? Answer in one sentence.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    try:
        import openai
    except ImportError:
        raise SystemExit("This example uses OpenAI's client: pip install openai") from None
    try:
        ask(openai.OpenAI(base_url=options.url, api_key="unused"), options)
    except openai.APIConnectionError:
        raise SystemExit(f"No server answers at {options.url}: start one with `kvasir serve`, or set --url.") from None
    except openai.APIStatusError as error:
        raise SystemExit(f"The server at {options.url} refused the request: {error}") from None


def ask(client: openai.OpenAI, options: argparse.Namespace) -> None:
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, usage = None, None
    for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and (text := chunk.choices[0].delta.content):
            first = first or time.perf_counter()
            print(text, end="", flush=True)
    ended = time.perf_counter()
    if first is None or usage is None:
        raise SystemExit("The server sent no text.")
    print(f"\n\nfirst token after {1000 * (first - started):.0f} ms, {usage.completion_tokens} tokens", end="")
    print(f", {(usage.completion_tokens - 1) / (ended - first):.1f} tokens/s" if usage.completion_tokens > 1 else "")


if __name__ == "__main__":
    main()
