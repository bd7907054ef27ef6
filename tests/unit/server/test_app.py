"""The API's description is exact about bodies: what is converted fits it, what does not fit is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from kvasir.server.app import BOOLEAN_TEXT, INTEGER_TEXT, NUMBER_TEXT, make_app
from kvasir.server.config import ServerConfig
from kvasir.server.schema.chat import ChatRequest
from kvasir.server.state import ServerState

MESSAGES = [{"role": "user", "content": "Hi"}]


def spec(**settings: Any) -> dict[str, Any]:
    return make_app(ServerState(ServerConfig(**settings), "m")).openapi()


@pytest.fixture(scope="module")
def described() -> jsonschema.Draft202012Validator:
    found = spec()
    schema = {"$ref": "#/components/schemas/ChatRequest", "components": found["components"]}
    return jsonschema.Draft202012Validator(schema)


def accepts(body: dict[str, Any]) -> bool:
    try:
        ChatRequest.model_validate(body)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("field", "pattern", "letters", "longest"),
    [
        ("seed", INTEGER_TEXT, "01_.+-", 5),
        ("temperature", NUMBER_TEXT, "1_.-e", 5),
        ("seed", INTEGER_TEXT, "1 \n\u00a0\u0085\u2003x", 3),
        ("temperature", NUMBER_TEXT, "1 \n\u00a0\u0085\u2003x", 3),
        ("ignore_eos", BOOLEAN_TEXT, "0123tfynToesrualFx ", 2),
    ],
)
def test_texts_of_numbers_and_booleans(field: str, pattern: str, letters: str, longest: int) -> None:
    """All short texts are read as described, and no others. With leading zeros some that are described are refused."""
    matches = 0
    for length in range(longest + 1):
        for text in map("".join, itertools.product(letters, repeat=length)):
            described = re.search(pattern, text) is not None
            accepted = accepts({"messages": MESSAGES, field: text})
            odd = described and field == "seed" and text.lstrip("+-").startswith("0")
            assert accepted == described or odd, text
            matches += accepted
    assert matches > 2


VALUES = [
    *(
        True,
        False,
        None,
        0,
        1,
        2,
        -1,
        0.0,
        1.0,
        2.0,
        0.5,
        "0",
        "1",
        "2",
        "true",
        "FALSE",
        "Yes",
        "oN",
        "off",
        "maybe",
        "",
    ),
    *("12", " 12 ", "+1_000", "12.0", "12.5", "1e3", "0x1", ".5", "inf", "nan", "word", [], ["1"], [1], [True], ["x"]),
    *({}, {"5": 1}, {"5": "1.5"}, {"5": True}, {"5": "x"}, {"include_usage": "yes"}, {"include_usage": 2}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_does_not_fit_is_refused(described: jsonschema.Draft202012Validator, value: Any) -> None:
    """The other way round, rules between fields and limits of converted values are not described."""
    kinds = ("ignore_eos", "seed", "n", "temperature", "stop", "stop_token_ids", "logit_bias", "early_stopping")
    for field in (*kinds, "messages", "stream_options", "timeout", "model", "chat_template_kwargs", "service_tier"):
        body = {"messages": MESSAGES, "stream": True, field: value}
        if accepts(body):
            assert described.is_valid(body), (field, value)


@pytest.mark.parametrize(
    ("field", "fits", "does_not"),
    [
        ("ignore_eos", [True, 1, 0.0, "ON", None], [2, "maybe", "", [], 0.5]),
        ("seed", [3, 3.0, "3", " +3.0 ", True], ["3.5", 3.5, "x", "", {}]),
        ("temperature", [0.5, ".5e1", False], ["warm", "1e", []]),
        ("n", [1, "1"], [0, "one"]),
        ("logit_bias", [{"5": "1.5"}], [{"5": "x"}]),
        ("stop_token_ids", [[1, "2", True]], [["x"]]),
    ],
)
def test_the_description_has_both_sides(
    described: jsonschema.Draft202012Validator, field: str, fits: list[Any], does_not: list[Any]
) -> None:
    for value in fits:
        assert described.is_valid({"messages": MESSAGES, field: value}) and accepts(
            {"messages": MESSAGES, field: value}
        )
    for value in does_not:
        assert not described.is_valid({"messages": MESSAGES, field: value}), value


def test_unknown_fields_follow_the_policy() -> None:
    for policy in ("warn", "ignore", "refuse"):
        schemas = spec(unknown_fields=policy)["components"]["schemas"]
        assert schemas["ChatRequest"]["additionalProperties"] is (policy != "refuse")
        assert schemas["StreamOptions"]["additionalProperties"] is False, "only at the top"
