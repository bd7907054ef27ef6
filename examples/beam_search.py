"""Finds the most likely completions of a prompt with beam search, then with diverse beam search.

usage: python examples/beam_search.py [--model MODEL] [PROMPT]
"""

import argparse

from kvasir import LLM, BeamSearchParams
from kvasir.models.hub import find_starter_model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="The three primary colours are")
    parser.add_argument("--model", help="a directory, a GGUF file or a hub name (default: the starter model)")
    parser.add_argument("--max-tokens", type=int, default=16)
    options = parser.parse_args()

    searches = {
        "beam search": BeamSearchParams(beam_width=4, max_tokens=options.max_tokens),
        "diverse beam search": BeamSearchParams(
            beam_width=4, max_tokens=options.max_tokens, num_beam_groups=2, diversity_penalty=1.0
        ),
    }
    with LLM(options.model or str(find_starter_model()), max_model_len=1024) as llm:
        for name, params in searches.items():
            (found,) = llm.beam_search([options.prompt], params)
            print(f"{name}:")
            for sequence in found.sequences:
                print(f"  {sequence.cum_logprob:7.2f}  {sequence.text!r}")


if __name__ == "__main__":
    main()
