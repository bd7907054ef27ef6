"""Asks several questions about one text: with prefix caching the text is computed once.

usage: python examples/prefix_sharing.py [--model MODEL]
"""

import argparse
import time

from kvasir import LLM, SamplingParams
from kvasir.models.hub import find_starter_model

TEXT = (
    "Kvasir is the wisest of beings in the Norse tales. When the two families of gods made peace, all of them "
    "spat into a vat, and of what was in it they made a man so wise that nobody could ask him anything he did not "
    "know. Two dwarves, Fjalar and Galar, killed him, mixed his blood with honey, and it became the mead of "
    "poetry. "
) * 4
QUESTIONS = ["Who was Kvasir?", "How was he made?", "Who killed him?", "What is the mead of poetry?"]


def ask(model: str, caching: bool) -> tuple[float, int, int]:
    """Returns seconds, prompt tokens computed, and prompt tokens found in the cache."""
    chats = [[{"role": "system", "content": TEXT}, {"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(model, max_model_len=2048, enable_prefix_caching=caching) as llm:
        started = time.perf_counter()
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        seconds = time.perf_counter() - started
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return seconds, sum(len(output.prompt_token_ids) for output in outputs) - cached, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory, a GGUF file or a hub name (default: the starter model)")
    model = parser.parse_args().model or str(find_starter_model())
    for caching in (False, True):
        seconds, computed, cached = ask(model, caching)
        words = "with" if caching else "without"
        print(
            f"{words} prefix caching: {seconds:.2f} s, {computed} prompt tokens computed, {cached} found in the cache"
        )


if __name__ == "__main__":
    main()
