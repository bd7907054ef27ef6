"""Log-probabilities in the formats of chat, completions and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvasir.frontend.text.detokenizer import Detokenizer, make_detokenizer
from kvasir.frontend.text.tokenizer import Tokenizer
from kvasir.outputs import Logprob
from kvasir.server.schema.base import Reply
from kvasir.server.schema.chat import ChatLogprobs, TokenLogprob, TopLogprob

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express
Position = dict[int, Logprob] | None


class CompletionLogprobs(Reply, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class LogprobWriter:
    """`as_ids`: write tokens as "token_id:7" instead of their text. `named`: the request's logprob_token_ids, which are
    written at every position instead of the likeliest tokens."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False, named: Sequence[int] | None = None) -> None:
        self.as_ids = as_ids
        self._named = frozenset(named or ())
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else tokenizer.token_bytes(skip_special_tokens=False)

    def chat(self, token_ids: list[int], positions: Iterable[Position], num_top: int) -> ChatLogprobs:
        content = []
        for token, position in zip(token_ids, positions, strict=True):
            found = position or {}
            own = found.get(token)
            top = [self._top(other, each) for other, each in self._alternatives(found, num_top)]
            first = self._top(token, own or Logprob(MIN_LOGPROB))
            content.append(TokenLogprob(token=first.token, logprob=first.logprob, bytes=first.bytes, top_logprobs=top))
        return ChatLogprobs(content=content)

    def completion(
        self, token_ids: list[int], positions: Iterable[Position], num_top: int, offsets: list[int]
    ) -> CompletionLogprobs:
        """`offsets`: where each token's text begins in the reply's text."""
        made = CompletionLogprobs(text_offset=offsets, token_logprobs=[], tokens=[], top_logprobs=[])
        for token, position in zip(token_ids, positions, strict=True):
            own = (position or {}).get(token)
            made.tokens.append(self._text(token))
            made.token_logprobs.append(None if own is None else _number(own.logprob))
            made.top_logprobs.append(None if position is None else self._top_dict(token, position, num_top))
        return made

    def _top_dict(self, token: int, position: dict[int, Logprob], num_top: int) -> dict[str, float]:
        """The alternatives and the sampled token, as in OpenAI's interface."""
        chosen = dict(self._alternatives(position, num_top))
        chosen[token] = position[token]
        return {self._text(other): _number(each.logprob) for other, each in chosen.items()}

    def _alternatives(self, position: dict[int, Logprob], num: int) -> list[tuple[int, Logprob]]:
        """Alternatives at a position, the likeliest first."""
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        return [item for item in ranked if item[0] in self._named] if self._named else ranked[:num]

    def _top(self, token: int, each: Logprob) -> TopLogprob:
        text = self._text(token)
        return TopLogprob(token=text, logprob=_number(each.logprob), bytes=self._token_bytes(token, text))

    def _text(self, token: int) -> str:
        if self.as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def _token_bytes(self, token: int, text: str) -> list[int]:
        """The token's bytes. A token may be part of a character, which its text cannot show."""
        if self._bytes is not None and not self.as_ids:
            return list(self._bytes[token])
        return list(text.encode())


class TextOffsets:
    """Finds where each token's text begins in a text. A character of several tokens begins where the first one does.

    The tokens after `prompt_ids` are those of the text; `start` is where their text begins.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        start: int = 0,
        skip_special_tokens: bool = False,
        spaces_between: bool = True,
    ) -> None:
        self._at = start
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = make_detokenizer(tokenizer, prompt_ids, skip_special_tokens, spaces_between)

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        found = []
        for token in token_ids:
            found.append(self._at)
            self._at += len(self.push(token))
        return found

    def in_text(self, token_ids: Iterable[int], text: str) -> list[int]:
        """Return the offsets of a text's tokens, some of which the tokenizer may have added to it."""
        found = []
        for token in token_ids:
            found.append(self._at)
            piece = self.push(token)
            for each in (piece, piece.removeprefix(" ")):  # one that some tokenizers write before the first word
                if text.startswith(each, self._at):
                    self._at += len(each)
                    break
        return found

    def push(self, token: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push(token)


def prompt_logprobs(positions: Iterable[Position]) -> list[Any]:
    """vLLM's format: a mapping of token ids for each position, null for the first."""
    return [
        None
        if position is None
        else {
            str(token): {"logprob": _number(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in position.items()
        }
        for position in positions
    ]


def _number(value: float) -> float:
    return max(value, MIN_LOGPROB)
