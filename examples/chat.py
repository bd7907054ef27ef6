"""A chat of several turns: each turn sends the whole conversation, and earlier turns are found in the prefix cache.

usage: python examples/chat.py [--model MODEL] [TURN ...]
"""

import argparse

from kvasir import LLM, SamplingParams
from kvasir.models.hub import find_starter_model

TURNS = ["What is the capital of France?", "And of Italy?", "Which language do they speak there?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("turns", nargs="*", default=TURNS)
    parser.add_argument("--model", help="a directory, a GGUF file or a hub name (default: the starter model)")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    messages: list[dict[str, str]] = []
    with LLM(options.model or str(find_starter_model()), max_model_len=2048) as llm:
        for turn in options.turns:
            messages.append({"role": "user", "content": turn})
            sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens)
            (output,) = llm.chat(messages, sampling, use_tqdm=False)
            answer = output.outputs[0].text.strip()
            messages.append({"role": "assistant", "content": answer})
            print(f"> {turn}\n{answer}")
            print(f"  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached)\n")


if __name__ == "__main__":
    main()
