"""How much of the event loop's time and memory one request may take by its parameters alone.

Stop strings are looked for in every piece of text, and every beginning of one is kept; a pattern of repetitions costs a
comparison for each of its lengths at every token, and every log-probability asked for is written at every token.
Offline that is the caller's own affair; here others wait.
"""

from __future__ import annotations

from kvasir.errors import RequestError
from kvasir.sampling_params import SamplingParams

MOST_STOPS = 64
LONGEST_STOP = 1024  # characters
MOST_BAD_WORDS = 1024
LONGEST_BAD_WORD = 1024
LONGEST_PATTERN = 256  # tokens
MOST_NAMED_LOGPROBS = 1024  # written for every token


def check_sizes(params: SamplingParams) -> None:
    _check_texts("stop", params.stop, MOST_STOPS, LONGEST_STOP)
    _check_texts("bad_words", params.bad_words, MOST_BAD_WORDS, LONGEST_BAD_WORD)
    if len(params.logprob_token_ids or ()) > MOST_NAMED_LOGPROBS:
        message = f"logprob_token_ids may have at most {MOST_NAMED_LOGPROBS} entries on a server."
        raise RequestError(message, "logprob_token_ids")
    detection = params.repetition_detection
    if detection is not None and detection.max_pattern_size > LONGEST_PATTERN:
        message = f"repetition_detection.max_pattern_size may be at most {LONGEST_PATTERN} on a server."
        raise RequestError(message, "repetition_detection")


def _check_texts(name: str, texts: str | list[str] | None, most: int, longest: int) -> None:
    if len(texts or ()) > most:
        raise RequestError(f"{name} may have at most {most} entries on a server.", name)
    if any(len(text) > longest for text in texts or ()):
        raise RequestError(f"An entry of {name} may have at most {longest} characters on a server.", name)
