"""What schemas say about strings, as regular expressions, against Python's own readers of the formats."""

from __future__ import annotations

import ipaddress
import re
from random import Random

import pytest

from kvasir.parsers.schemas import text_rules


def fits(name: str, text: str) -> bool:
    [rule] = text_rules({"format": name}) or [""]
    return re.fullmatch(rule, text) is not None


def test_ipv6() -> None:
    random = Random(1)
    for _ in range(2000):
        text = str(ipaddress.IPv6Address(random.getrandbits(128) & random.getrandbits(128) & random.getrandbits(128)))
        assert fits("ipv6", text), text
        assert fits("ipv6", ipaddress.IPv6Address(text).exploded)
    for text in ("::", "::1", "1::", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "2001:db8::8a2e:370:7334"):
        assert fits("ipv6", text) and ipaddress.IPv6Address(text), text
    for text in (
        "",
        ":",
        ":::",
        "1",
        "1:2:3:4:5:6:7",
        "1:2:3:4:5:6:7:8:9",
        "1::2::3",
        "12345::",
        "g::",
        "1:2:3:4:5:6:7:8::",
    ):
        assert not fits("ipv6", text), text


def test_durations() -> None:
    for text in ("P1D", "P1Y2M3D", "P2W", "PT1H", "PT1H30M", "P1DT12H", "PT0S", "P1M", "PT5M20S"):
        assert fits("duration", text), text
    for text in ("P", "PT", "P1", "1D", "P1DT", "P1W2D", "PT1S1H", "P1Y3D"):
        assert not fits("duration", text), text


@pytest.mark.parametrize("schema", [{"minLength": True}, {"minLength": 1.5}])
def test_lengths_that_are_none_say_nothing(schema: dict[str, object]) -> None:
    assert text_rules(schema) == []
