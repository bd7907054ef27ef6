"""httpx and websockets with patience: their own limits, 5 and 10 s, are short on a machine with other things to do."""

from __future__ import annotations

from functools import partial

import httpx
from websockets.sync import client

PATIENCE = 180.0  # seconds for what takes one on a quiet machine

delete = partial(httpx.delete, timeout=PATIENCE)
get = partial(httpx.get, timeout=PATIENCE)
options = partial(httpx.options, timeout=PATIENCE)
post = partial(httpx.post, timeout=PATIENCE)
request = partial(httpx.request, timeout=PATIENCE)
stream = partial(httpx.stream, timeout=PATIENCE)
connect = partial(client.connect, open_timeout=PATIENCE, close_timeout=PATIENCE)
