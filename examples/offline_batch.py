"""Runs several chats as one offline batch and prints the answers and the throughput.

usage: python examples/offline_batch.py [--model DIRECTORY-OR-HUB-NAME]
"""

import argparse
import time

from kvasir import LLM, SamplingParams
from kvasir.models.hub import find_starter_model

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 7 times 6?",
    "Name three colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Give a short piece of advice to a young cook.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory, a GGUF file or a hub name (default: the starter model)")
    parser.add_argument("--max-tokens", type=int, default=64, help="length limit of each answer, in tokens")
    options = parser.parse_args()

    llm = LLM(options.model or str(find_starter_model()), max_model_len=2048)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)

    started = time.perf_counter()
    answers = llm.chat(chats, sampling)
    seconds = time.perf_counter() - started

    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"\n> {question}\n{answer.outputs[0].text.strip()}")
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    print(f"\n{tokens} tokens for {len(answers)} chats in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")


if __name__ == "__main__":
    main()
