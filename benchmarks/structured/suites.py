"""Public collections of JSON schemas: how many can be enforced strictly, and whether an invalid instance is accepted.

    python benchmarks/structured/suites.py MODEL maskbench/data        # of github.com/guidance-ai/jsonschemabench
    python benchmarks/structured/suites.py MODEL tests/draft2020-12    # of json-schema-org/JSON-Schema-Test-Suite there

A file of MaskBench has one schema with instances; its split is the beginning of its name (`Github_easy---o1.json`). A
file of the test suite has a list of schemas with instances, and is one split of its own. A schema is right if it takes
exactly the valid instances; it is refused if a request with it would be a 400.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvasir.config.args import EngineArgs
from kvasir.config.resolve import resolve
from kvasir.engine.grammar_compile import compile_grammar
from kvasir.errors import RequestError
from kvasir.frontend.requests.structured import grammar_tokenizer
from kvasir.frontend.text.grammar import JsonStyle, build_grammar
from kvasir.sampling_params import StructuredOutputsParams

Case = tuple[Any, list[tuple[Any, bool]]]  # a schema; instances, and whether they are valid


def main() -> None:
    options = arguments()
    tokenizer = grammar_tokenizer(model_config(options.model))
    totals: dict[str, Counter[str]] = {}
    seconds: list[float] = []
    for split, name, (schema, instances) in cases(options.directories):
        count = totals.setdefault(split, Counter())
        start = time.process_time()
        try:
            params = StructuredOutputsParams(json=schema)
            compiled = compile_grammar(tokenizer, build_grammar(params, JsonStyle(lenient=options.lenient)).text)
        except RequestError as error:
            count["refused"] += 1
            if options.verbose:
                print("refused", name, str(error)[:120])
            continue
        finally:
            seconds.append(time.process_time() - start)
        wrong = Counter[str]()
        for instance, is_valid in instances:
            matcher = compiled.deep_copy()
            tokens = tokenizer.tokenize_str(json.dumps(instance, ensure_ascii=False))
            taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            if taken != is_valid:
                kind = "accepts an invalid instance" if taken else "rejects a valid instance"
                wrong[kind] += 1
                if options.verbose:
                    print(kind, name, json.dumps(instance)[:200])
        for kind in wrong:
            count[kind] += 1
        count["right"] += not wrong
    report(totals, seconds)


def report(totals: dict[str, Counter[str]], seconds: list[float]) -> None:
    kinds = ("right", "refused", "rejects a valid instance", "accepts an invalid instance")
    rows = {**totals, "all": sum(totals.values(), Counter())}
    for split, count in rows.items():
        number = count["right"] + sum(count[kind] for kind in kinds[1:])
        row = {"split": split, "schemas": number, "right_percent": round(100 * count["right"] / number, 1)}
        print("RESULT " + json.dumps({**row, **{kind: count[kind] for kind in kinds}}))
    seconds.sort()
    times = {f"p{100 * share:g}": round(1e3 * seconds[int(share * (len(seconds) - 1))], 2) for share in (0.5, 0.99, 1)}
    print("RESULT " + json.dumps({"compile_cpu_ms": times, "load": round(os.getloadavg()[0], 1)}))


def cases(directories: list[Path]) -> Iterator[tuple[str, str, Case]]:
    for directory in directories:
        for file in sorted(directory.rglob("*.json")):
            found = json.loads(file.read_text())
            if isinstance(found, dict):
                instances = [(test["data"], test["valid"]) for test in found.get("tests", ())]
                split = re.sub(r"(---.*|_[a-z_]*[0-9]+\.json)$", "", file.name)
                yield split, file.name, (found["schema"], instances)
                continue
            for group in found:
                instances = [(test["data"], test["valid"]) for test in group["tests"]]
                yield file.stem, f"{file.name} {group['description']}", (group["schema"], instances)


def model_config(model: str) -> Any:
    return resolve(EngineArgs(model=model)).model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model whose tokenizer is used")
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--lenient", action="store_true", help="skip keywords that cannot be enforced")
    parser.add_argument("--verbose", action="store_true", help="name every schema that is not right")
    return parser.parse_args()


if __name__ == "__main__":
    main()
