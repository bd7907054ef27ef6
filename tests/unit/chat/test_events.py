"""Server-sent events, cut anywhere."""

from __future__ import annotations

import pytest

from kvasir.entrypoints.cli.chat_backend import events

STREAM = 'data: {"a": "é\u2028"}\r\n\r\n: a comment\n\nid: 5\ndata:{"b":\ndata: 1}\n\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
def test_events(size: int) -> None:
    cut = (STREAM[i : i + size] for i in range(0, len(STREAM), size))
    assert list(events(cut)) == ['{"a": "é\u2028"}'.encode(), b'{"b":\n1}', b"[DONE]"]
