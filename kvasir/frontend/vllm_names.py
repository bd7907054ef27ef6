"""vLLM's names for what AsyncLLM does not do yet: each says so, and what to do instead. API process."""

from __future__ import annotations

from typing import Any, NoReturn

from kvasir.errors import RequestError


class NotYet:
    """A base class, so that nobody who comes from vLLM meets an AttributeError."""

    async def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("encode", "this engine generates text; pooling models are not run yet")

    async def add_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("add_lora", "LoRA adapters are not served yet; merge the adapter into the checkpoint")

    async def remove_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("remove_lora", "LoRA adapters are not served yet")

    async def pin_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("pin_lora", "LoRA adapters are not served yet")

    async def list_loras(self) -> set[int]:
        return set()

    async def sleep(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("sleep", "weights stay where they are; shut the engine down to free its memory")

    async def wake_up(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("wake_up", "this engine never sleeps")

    async def is_sleeping(self) -> bool:
        return False

    async def start_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("start_profile", "profile the engine's process from outside, with py-spy or nsys")

    async def stop_profile(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("stop_profile", "profile the engine's process from outside, with py-spy or nsys")

    async def collective_rpc(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("collective_rpc", "workers take no calls from outside; `call` asks the engine's core")


def _refuse(name: str, why: str) -> NoReturn:
    raise RequestError(f"{name} is not supported: {why}.")
