"""The adapters of a server: those of --lora-modules, of the watched folder, and those that are loaded while it runs.

Every API process has its own list; the engine knows adapters by their content only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir.entrypoints.async_llm import AsyncLLM
from kvasir.errors import ConfigError, RequestError
from kvasir.log import get_logger
from kvasir.lora.host import CONFIG, WEIGHTS, Adapter, AdapterCatalog, AdapterNotFoundError
from kvasir.server.config import ServerConfig
from kvasir.server.errors import ApiError

logger = get_logger(__name__)
WATCH_SECONDS = 2.0  # between two looks at the watched folder


@dataclass(frozen=True)
class AdapterModule:
    """One entry of --lora-modules."""

    name: str
    path: str
    task_id: int | None = None


def read_modules(given: Sequence[str]) -> list[AdapterModule]:
    """Entries of --lora-modules: name=path, or JSON with name, path and, for a multitask prompt, task_id."""
    found = []
    for text in given:
        if not text.lstrip().startswith("{"):
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ConfigError(f"--lora-modules {text!r} is neither name=path nor JSON.")
            found.append(AdapterModule(name, path))
            continue
        try:
            entry = json.loads(text)
            known = {key: entry.pop(key) for key in ("name", "path", "task_id") if key in entry}
            entry.pop("base_model_name", None)  # vLLM's; an adapter's base is the model that is served
            if entry:
                raise ValueError(f"unknown entries: {', '.join(entry)}")
            found.append(AdapterModule(**known))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--lora-modules {text!r} is no such JSON: {error}.") from error
    return found


class ServedAdapters:
    """Names of adapters in requests. Empty until the engine runs, and without enable_lora."""

    def __init__(self, config: ServerConfig, model_names: Sequence[str], num_processes: int) -> None:
        self.modules = read_modules(config.lora_modules)
        self._folder = None if config.lora_dir is None else Path(config.lora_dir).expanduser()
        self._admin_key = config.lora_admin_key
        self._model_names, self._num_processes = model_names, num_processes
        self._catalog: AdapterCatalog | None = None
        self._watched: dict[str, str] = {}  # names from the watched folder, and what was wrong with them

    @property
    def is_asked_for(self) -> bool:
        return bool(self.modules) or self._folder is not None

    def all(self) -> list[Adapter]:
        return [] if self._catalog is None else list(self._catalog)

    def get(self, name: str) -> Adapter | None:
        return None if self._catalog is None else self._catalog.get(name)

    # ------------------------------------------------------------ the start, and the watched folder

    async def start(self, engine: AsyncLLM) -> None:
        """Read the adapters that the settings name. An adapter that cannot be used is an error."""
        if not engine.config.adapters.enable_lora:
            if self.is_asked_for:
                raise ConfigError("--lora-modules and --lora-dir need --enable-lora.")
            return
        self._catalog = await engine.adapters()
        for module in self.modules:
            try:
                await self.load(module.name, module.path, module.task_id)
            except (RequestError, ApiError) as error:
                message = str(error).replace("lora_path=", "path=")  # as in the entry
                raise ConfigError(f"--lora-modules {module.name}: {message}") from error
        await self.look()

    async def watch(self) -> None:
        """Look at the watched folder again and again; returns at once if there is none."""
        while self._folder is not None and self._catalog is not None:
            await asyncio.sleep(WATCH_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Serve what the watched folder holds now: each of its directories is an adapter of that name."""
        if self._folder is None or self._catalog is None:
            return
        present = await asyncio.to_thread(_directories, self._folder)
        for name in self._watched.keys() - present.keys():
            self._catalog.remove(name)
            del self._watched[name]
            logger.info("adapter %s has left %s", name, self._folder)
        for name, path in present.items():
            if name in self._model_names or (name not in self._watched and name in self._catalog):
                continue
            before, known = self._catalog.get(name), self._watched.get(name)
            try:
                adapter = await asyncio.to_thread(self._catalog.read, name, str(path))
            except RequestError as error:
                if known != str(error):
                    logger.warning("%s", error)
                self._watched[name] = str(error)
                continue
            self._watched[name] = ""
            if before is None or before.digest != adapter.digest:
                self._catalog.add(adapter)
                logger.info("adapter %s is served from %s", name, path)

    # ------------------------------------------------------------ while the server runs

    def check_admin(self, presented: str | None) -> None:
        """Raise unless the admin key, which allows loading adapters, is presented."""
        if self._admin_key is None:
            raise ApiError(
                403, "Adapters are not loaded by request here: set --lora-admin-key.", "auth", code="forbidden"
            )
        if presented is None or not hmac.compare_digest(presented.encode(), self._admin_key.encode()):
            raise ApiError(
                401, "Send the key of --lora-admin-key as Authorization: Bearer KEY.", "auth", code="invalid_api_key"
            )
        if self._num_processes > 1:
            message = (
                f"This server has {self._num_processes} API processes, which share no list of adapters: use --lora-dir."
            )
            raise ApiError(409, message, "conflict")
        if self._catalog is None:
            raise ApiError(409, "This server takes no adapters: start it with --enable-lora.", "conflict")

    async def load(self, name: str, path: str, task_id: int | None = None, replace: bool = False) -> Adapter:
        assert self._catalog is not None, "the engine takes adapters"
        if name in self._model_names:
            raise RequestError(f"{name!r} is the name of the model itself; choose another.", "lora_name")
        if name in self._catalog and not replace:
            raise RequestError(
                f"adapter {name!r} is loaded already; unload it first, or set load_inplace.", "lora_name"
            )
        adapter = await asyncio.to_thread(self._catalog.read, name, path, task_id)
        self._catalog.add(adapter)
        logger.info("adapter %s is served from %s", name, path)
        return adapter

    def unload(self, name: str) -> None:
        """Forget a name. Requests that use the adapter run on."""
        assert self._catalog is not None, "the engine takes adapters"
        if not self._catalog.remove(name):
            raise AdapterNotFoundError(f"There is no adapter {name!r}.", "lora_name")
        self._watched.pop(name, None)
        logger.info("adapter %s is no longer served", name)


def _directories(folder: Path) -> dict[str, Path]:
    """List the complete adapters in a folder. One that is being written has no config yet."""
    if not folder.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".") and (path / CONFIG).is_file() and (path / WEIGHTS).is_file()
    }
