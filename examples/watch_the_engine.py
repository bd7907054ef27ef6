"""Sends requests to watch in the engine view: open http://127.0.0.1:8000/engine, then run this.

They share a long prompt (shared blocks), join while others run (continuous batching), end at different times (their
blocks turn grey and the next requests hit them), and one asks for four completions (copy on write).

usage: python examples/watch_the_engine.py [--url http://127.0.0.1:8000/v1] [--rounds 3]
Start a server first: kvasir serve
"""

import argparse
import asyncio

import httpx

TEXT = (
    "You answer questions about this text. Kvasir is the wisest of beings in the Norse tales. When the two "
    "families of gods made peace, all of them spat into a vat, and of what was in it they made a man so wise that "
    "nobody could ask him anything he did not know. He travelled far through the world to teach people. Two "
    "dwarves, Fjalar and Galar, invited him, killed him, and let his blood run into two vats and a kettle. They "
    "mixed it with honey, and it became the mead of poetry: whoever drinks of it becomes a poet or a scholar. To "
    "the gods the dwarves said that Kvasir had drowned in his own wisdom, because nobody was learned enough to "
    "ask him all he knew."
)
QUESTIONS = [
    "Who was Kvasir?",
    "How was he made?",
    "Who killed him?",
    "What did they make of his blood?",
    "What did they tell the gods?",
    "Write a poem about it.",
]


async def ask(client: httpx.AsyncClient, after: float, question: str, **extra: object) -> int:
    await asyncio.sleep(after)
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
    reply = await client.post("chat/completions", json={"messages": messages, "temperature": 0.8, **extra})
    reply.raise_for_status()
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def round_of_requests(client: httpx.AsyncClient, pace: float, max_tokens: int) -> None:
    asked = [
        ask(client, pace * number, question, max_tokens=max_tokens // 2 + max_tokens * number // len(QUESTIONS))
        for number, question in enumerate(QUESTIONS)
    ]
    asked.append(ask(client, pace * len(QUESTIONS), "Say one word about it.", n=4, max_tokens=max_tokens))
    cached = await asyncio.gather(*asked)
    print(f"{len(cached)} requests; prompt tokens found in the cache: {', '.join(map(str, cached))}")


async def run(options: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:
        for _ in range(options.rounds):
            await round_of_requests(client, options.pace, options.max_tokens)
            await asyncio.sleep(options.pace)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=0.5, help="seconds between two requests")
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    try:
        asyncio.run(run(options))
    except httpx.HTTPStatusError as error:
        raise SystemExit(
            f"The server at {options.url} answered {error.response.status_code}; its log says why."
        ) from None
    except httpx.TransportError:
        raise SystemExit(f"No server answers at {options.url}: start one with `kvasir serve`, or set --url.") from None


if __name__ == "__main__":
    main()
