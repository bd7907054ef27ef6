"""The server's settings, and the flags made from them as from the engine's (kvasir/config/engine.py).

Imported by the command line before anything else, so it imports nothing heavy.
"""

from __future__ import annotations

import argparse
import json
import ssl
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from kvasir.config.args import EngineArgs, flag, flag_options, from_python
from kvasir.config.engine import SettingField, setting, settings_of
from kvasir.errors import ConfigError
from kvasir.models import starter


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP server: address, access, limits, logs."""

    host: str = setting("0.0.0.0", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = setting("", "Path prefix under which a proxy exposes the server.")
    api_server_count: int = setting(
        1, "API processes that share the engine and the port.", minimum=1, maximum=64, short=("-asc",)
    )
    served_model_name: list[str] = setting(
        list, "Names of the model in requests; replies use the first. Unset: the value of model."
    )

    api_key: list[str] = setting(
        list, "API keys; clients must send one of them. Unset: KVASIR_API_KEY, or no key is needed.", secret=True
    )
    api_key_file: str | None = setting(None, "YAML file of keys with names, weights and limits (docs/server.md).")
    allowed_origins: list[str] = setting(list, "Web origins that may use the server from a browser (CORS); * for all.")
    allowed_methods: list[str] = setting(lambda: ["*"], "HTTP methods that allowed origins may use.")
    allowed_headers: list[str] = setting(lambda: ["*"], "HTTP headers that allowed origins may send.")
    allow_credentials: bool = setting(False, "Whether allowed origins may send cookies and credentials.")
    ssl_keyfile: str | None = setting(None, "File of the TLS key.")
    ssl_certfile: str | None = setting(None, "File of the TLS certificate.")
    ssl_ca_certs: str | None = setting(None, "File of certificate authorities for clients' certificates.")
    ssl_cert_reqs: int = setting(
        int(ssl.CERT_NONE), "Clients' certificates: 0 none, 1 optional, 2 required.", choices=(0, 1, 2)
    )
    ssl_ciphers: str | None = setting(None, "TLS ciphers in OpenSSL's format.")

    max_request_bytes: int = setting(16 << 20, "Maximum size of a request body; larger ones get 413.", minimum=1)
    max_prompt_tokens: int | None = setting(None, "Maximum number of prompt tokens; longer prompts get 413.", minimum=1)
    max_choices: int = setting(4096, "Maximum number of completions of a request (prompts times n).", minimum=1)
    request_timeout: float | None = setting(
        None, "Seconds after which requests time out; a request may set a shorter timeout.", above=0
    )
    shutdown_timeout: float = setting(30.0, "Seconds for running requests to finish after SIGTERM.", minimum=0)
    max_stored_responses: int = setting(
        1000, "Number of responses of /v1/responses that are stored; 0: none.", minimum=0
    )

    response_role: str = setting("assistant", "Role of replies to a generation prompt.")
    trust_request_chat_template: bool = setting(False, "Accept chat templates in requests.")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Leave tools out of the chat template when tool_choice is none."
    )
    enable_force_include_usage: bool = setting(False, "End every stream with a usage chunk, requested or not.")
    enable_prompt_tokens_details: bool = setting(True, "Return the number of cached prompt tokens in usage.")
    enable_request_id_headers: bool = setting(True, "Return the header X-Request-Id.")

    enable_log_requests: bool = setting(False, "Also log prompts and parameters.")
    max_log_len: int | None = setting(None, "Maximum number of logged characters of a prompt.", minimum=0)
    log_format: str = setting("text", "Format of log lines.", choices=("text", "json"))
    uvicorn_log_level: str = setting(
        "warning",
        "Log level of the web server.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    disable_log_stats: bool = setting(False, "Do not log statistics every ten seconds.")
    disable_fastapi_docs: bool = setting(False, "Serve no /docs and no /openapi.json.")
    vllm_metric_names: bool = setting(False, "Also export every metric under vLLM's prefix.")
    otlp_traces_endpoint: str | None = setting(None, "Endpoint for OpenTelemetry traces (needs the extra otel).")

    def __post_init__(self) -> None:
        for name, known in server_settings().items():
            known.check(name, getattr(self, name))
            if list in known.types and not all(isinstance(item, str) for item in getattr(self, name)):
                raise ConfigError(f"{name} must be a list of strings.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile.")
        if self.port == 0 and self.api_server_count > 1:
            raise ConfigError("api_server_count above 1 needs a fixed port: set port.")


@cache
def server_settings() -> dict[str, SettingField]:
    return settings_of("server", ServerConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for the server's settings and the engine's."""
    group = parser.add_argument_group("server")
    for name, known in server_settings().items():
        group.add_argument(*known.setting.short, flag(name), **_options(name, known))
    EngineArgs.add_cli_args(parser)


def _options(name: str, known: SettingField) -> dict[str, Any]:
    options = flag_options(name, known)
    if list in known.types:  # several words, or one JSON list as in vLLM
        options |= {"action": _Words, "nargs": "+", "metavar": name.upper(), "type": str}
    return options


class _Words(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        found: list[str] = list(getattr(namespace, self.dest, []))
        for word in values:
            found += _json_list(word) if word.startswith("[") else [word]
        setattr(namespace, self.dest, found)


def _json_list(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text!r} is not a JSON list ({error}).") from None
    return [str(item) for item in found]


def from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """The server's settings among parsed arguments."""
    known = server_settings()
    given = {f.name: getattr(namespace, f.name) for f in fields(ServerConfig) if hasattr(namespace, f.name)}
    return ServerConfig(**{name: _value(name, known[name], value) for name, value in given.items()})


def with_starter_model(namespace: argparse.Namespace, config: ServerConfig) -> ServerConfig:
    """If no model was named, name the starter model, under its own name instead of a path."""
    if not starter.use_as_default(namespace):
        return config
    return replace(config, served_model_name=config.served_model_name or [starter.NAME])


def _value(name: str, known: SettingField, value: Any) -> Any:
    if list in known.types and isinstance(value, str):  # one word in a --config file
        return [value]
    return from_python(name, known, value)
