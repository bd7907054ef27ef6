"""The server's own settings, written once like the engine's (kvasir/config/engine.py), and the flags made from them.

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
    """How the server listens, whom it answers, what it counts."""

    host: str = setting("0.0.0.0", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = setting("", "Path under which a proxy shows the server.")
    api_server_count: int = setting(
        1, "API processes that share the engine and the port.", minimum=1, maximum=64, short=("-asc",)
    )
    served_model_name: list[str] = setting(
        list, "Names the model goes by in requests; replies use the first. Unset: what was given as model."
    )

    api_key: list[str] = setting(
        list, "Keys that clients must send one of. Unset: KVASIR_API_KEY, or nobody is asked for one.", secret=True
    )
    api_key_file: str | None = setting(None, "YAML file of keys with names, weights and limits (docs/server.md).")
    allowed_origins: list[str] = setting(list, "Web origins that browsers let use the server (CORS); * for all.")
    allowed_methods: list[str] = setting(lambda: ["*"], "Methods allowed to them.")
    allowed_headers: list[str] = setting(lambda: ["*"], "Headers allowed to them.")
    allow_credentials: bool = setting(False, "Whether they may send cookies and credentials.")
    ssl_keyfile: str | None = setting(None, "The TLS key's file.")
    ssl_certfile: str | None = setting(None, "The TLS certificate's file.")
    ssl_ca_certs: str | None = setting(None, "File of certificate authorities that clients' certificates are from.")
    ssl_cert_reqs: int = setting(
        int(ssl.CERT_NONE), "Clients' certificates: 0 none, 1 optional, 2 required.", choices=(0, 1, 2)
    )
    ssl_ciphers: str | None = setting(None, "TLS ciphers, as OpenSSL writes them.")

    max_request_bytes: int = setting(16 << 20, "Longest request body; longer ones get 413.", minimum=1)
    max_prompt_tokens: int | None = setting(None, "Longest prompt; longer ones get 413.", minimum=1)
    max_choices: int = setting(4096, "Most completions one request may ask for (prompts times n).", minimum=1)
    request_timeout: float | None = setting(
        None, "Seconds a request may take; one that asks for a shorter timeout gets that.", above=0
    )
    shutdown_timeout: float = setting(30.0, "Seconds that running requests get to finish after SIGTERM.", minimum=0)
    max_stored_responses: int = setting(1000, "Responses of /v1/responses that are kept; 0: none.", minimum=0)

    response_role: str = setting("assistant", "Role of replies where a generation prompt is added.")
    trust_request_chat_template: bool = setting(False, "Let requests bring a chat template of their own.")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Do not show tools to the chat template when tool_choice is none."
    )
    enable_force_include_usage: bool = setting(False, "Every stream ends with a usage chunk, asked for or not.")
    enable_prompt_tokens_details: bool = setting(True, "Usage says how many prompt tokens were cached.")
    enable_request_id_headers: bool = setting(True, "Answers carry X-Request-Id.")

    enable_log_requests: bool = setting(False, "Log prompts and parameters, too.")
    max_log_len: int | None = setting(None, "Most characters of a prompt in the log.", minimum=0)
    log_format: str = setting("text", "How log lines are written.", choices=("text", "json"))
    uvicorn_log_level: str = setting(
        "warning",
        "Least important messages of the web server to log.",
        choices=("debug", "info", "warning", "error", "critical"),
    )
    disable_log_stats: bool = setting(False, "Do not log a line of figures every ten seconds of work.")
    disable_fastapi_docs: bool = setting(False, "Serve no /docs and no /openapi.json.")
    vllm_metric_names: bool = setting(False, "Export every metric under vLLM's prefix, too.")
    otlp_traces_endpoint: str | None = setting(None, "Where OpenTelemetry traces are sent (needs the extra otel).")

    def __post_init__(self) -> None:
        for name, known in server_settings().items():
            known.check(name, getattr(self, name))
            if list in known.types and not all(isinstance(item, str) for item in getattr(self, name)):
                raise ConfigError(f"{name} must be a list of strings.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile.")
        if self.port == 0 and self.api_server_count > 1:
            raise ConfigError("Several API processes need a port that is known: set port.")


@cache
def server_settings() -> dict[str, SettingField]:
    return settings_of("server", ServerConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the server's settings and the engine's."""
    group = parser.add_argument_group("server")
    for name, known in server_settings().items():
        group.add_argument(*known.setting.short, flag(name), **_options(name, known))
    EngineArgs.add_cli_args(parser)


def _options(name: str, known: SettingField) -> dict[str, Any]:
    options = flag_options(name, known)
    if list in known.types:  # several words, or one JSON list as vLLM has it
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
