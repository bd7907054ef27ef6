"""The server's list of adapters: settings, the key of those who load them, names."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir.errors import ConfigError, RequestError
from kvasir.lora.host import CONFIG, WEIGHTS, AdapterNotFoundError
from kvasir.server.adapters import AdapterModule, ServedAdapters, read_modules
from kvasir.server.config import ServerConfig
from kvasir.server.errors import ApiError, as_api_error


def test_lora_modules_are_pairs_or_json() -> None:
    given = ["a=/x=y", '{"name": "b", "path": "/z", "task_id": 2, "base_model_name": "m"}']
    assert read_modules(given) == [AdapterModule("a", "/x=y"), AdapterModule("b", "/z", 2)]
    for wrong in ("a", "=x", "a=", '{"name": "b"}', '{"name": "b", "path": "/z", "rank": 3}', "{"):
        with pytest.raises(ConfigError, match="--lora-modules"):
            read_modules([wrong])


def served(num_processes: int = 1, **settings: Any) -> ServedAdapters:
    return ServedAdapters(ServerConfig(**settings), ["model"], num_processes)


def refusal(adapters: ServedAdapters, key: str | None) -> int:
    with pytest.raises(ApiError) as caught:
        adapters.check_admin(key)
    return caught.value.status


def test_loading_needs_the_admin_key() -> None:
    assert refusal(served(), "any") == 403
    assert refusal(served(lora_admin_key="open"), None) == refusal(served(lora_admin_key="open"), "shut") == 401
    assert refusal(served(2, lora_admin_key="open"), "open") == 409  # processes share no list
    assert refusal(served(lora_admin_key="open"), "open") == 409  # no enable_lora


def test_names_are_taken_once_and_given_back() -> None:
    adapters = served()
    adapters._catalog = FakeCatalog()  # type: ignore[assignment]
    asyncio.run(adapters.load("one", "/path"))
    with pytest.raises(RequestError, match="loaded already"):
        asyncio.run(adapters.load("one", "/path"))
    asyncio.run(adapters.load("one", "/path", replace=True))
    with pytest.raises(RequestError, match="name of the model itself"):
        asyncio.run(adapters.load("model", "/path"))
    adapters.unload("one")
    with pytest.raises(AdapterNotFoundError) as caught:
        adapters.unload("one")
    assert as_api_error(caught.value).status == 404


def test_the_watched_folder_is_followed(tmp_path: Path) -> None:
    adapters = served(lora_dir=str(tmp_path))
    catalog = adapters._catalog = FakeCatalog()  # type: ignore[assignment]

    def seen() -> dict[str, str]:
        asyncio.run(adapters.look())
        return {name: adapter.digest for name, adapter in catalog.items()}

    def write(name: str, content: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / WEIGHTS).write_text(content)
        (tmp_path / name / CONFIG).write_text("")

    asyncio.run(adapters.load("given", "elsewhere"))
    for name in ("one", "model", "given", ".hidden"):  # the model's name and one that is taken stay as they are
        write(name, "1")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / CONFIG).write_text("")
    assert seen() == {"given": "elsewhere", "one": "1"}
    write("one", "2")
    write("two", "wrong")  # one that cannot be used is not served ...
    assert seen() == {"given": "elsewhere", "one": "2"}
    write("one", "wrong")  # ... and does not replace one that can
    assert seen() == {"given": "elsewhere", "one": "2"}
    write("two", "3")
    shutil.rmtree(tmp_path / "one")
    assert seen() == {"given": "elsewhere", "two": "3"}


class FakeCatalog(dict[str, Any]):
    def read(self, name: str, path: str, task_id: int | None = None) -> Any:
        file = Path(path) / WEIGHTS
        digest = file.read_text() if file.is_file() else path
        if digest == "wrong":
            raise RequestError("it fits no module")
        return SimpleNamespace(name=name, digest=digest)

    def add(self, adapter: Any) -> None:
        self[adapter.name] = adapter

    def remove(self, name: str) -> bool:
        return self.pop(name, None) is not None


def test_adapters_need_enable_lora() -> None:
    engine: Any = SimpleNamespace(config=SimpleNamespace(adapters=SimpleNamespace(enable_lora=False)))
    with pytest.raises(ConfigError, match="need --enable-lora"):
        asyncio.run(served(lora_modules=["a=b"]).start(engine))
    asyncio.run(served().start(engine))


def test_an_adapter_that_is_not_found_is_an_error_in_the_flags_words() -> None:
    class Empty(FakeCatalog):
        def read(self, name: str, path: str, task_id: int | None = None) -> Any:
            raise AdapterNotFoundError(f"adapter {name!r}: lora_path={path!r}: there is no such directory.")

    async def catalog() -> Empty:
        return Empty()

    config = SimpleNamespace(adapters=SimpleNamespace(enable_lora=True))
    engine: Any = SimpleNamespace(config=config, adapters=catalog)
    with pytest.raises(ConfigError) as error:
        asyncio.run(served(lora_modules=["a=/gone"]).start(engine))
    assert str(error.value) == "--lora-modules a: adapter 'a': path='/gone': there is no such directory."
