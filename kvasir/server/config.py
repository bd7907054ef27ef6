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
from kvasir.models import hub
from kvasir.parsers.formats import REASONING_NAMES, TOOL_NAMES, VLLM_FORMATS


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP server: address, access, limits, logs."""

    host: str = setting("0.0.0.0", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    root_path: str = setting(
        "", "Path prefix under which a proxy exposes the server; paths are served with it and without."
    )
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
    unknown_fields: str = setting(
        "warn",
        "Top-level fields of bodies that this server does not know: refuse them with a 400, ignore them and name them "
        "in a header and the log (warn), or ignore them.",
        choices=("refuse", "warn", "ignore"),
    )
    max_prompt_tokens: int | None = setting(None, "Maximum number of prompt tokens; longer prompts get 413.", minimum=1)
    max_tokenizing_characters: int | None = setting(
        None,
        "Maximum number of characters of long texts that are rendered or tokenized at once; others wait, and a longer "
        "text gets 413. Unset: 8 per token of the context, at least 1048576.",
        minimum=1,
    )
    max_choices: int = setting(4096, "Maximum number of completions of a request (prompts times n).", minimum=1)
    max_body_memory: int = setting(
        256 << 20,
        "Bytes of all bodies that an API process holds at a time, and of all replies; beyond it requests get 503.",
        minimum=1,
    )
    max_logprob_memory: int | None = setting(
        None,
        "Bytes of the log-probabilities of unfinished answers that an API process keeps, 250 for each; beyond it the "
        "request with the most gets 503. Unset: a quarter of the memory that the process may use.",
        minimum=1,
    )
    max_url_bytes: int = setting(8192, "Maximum length of a URL; longer ones get 414.", minimum=1)
    max_header_count: int = setting(100, "Maximum number of headers of a request; more get 431.", minimum=1)
    max_header_line_bytes: int = setting(8192, "Maximum length of one header; longer ones get 431.", minimum=1)
    max_header_bytes: int = setting(32 << 10, "Maximum length of all headers together; more gets 431.", minimum=1)
    max_connections: int = setting(
        8192, "Connections that an API process keeps open; further ones get 503, except for probes.", minimum=1
    )
    header_timeout: float = setting(60.0, "Seconds for the head of a request to arrive; then 408.", above=0)
    body_timeout: float = setting(
        60.0, "Seconds without a byte of a body, or below 16 KiB/s on average; then 408.", above=0
    )
    send_timeout: float = setting(60.0, "Seconds after which a client that reads nothing is disconnected.", above=0)
    keep_alive_timeout: float = setting(75.0, "Seconds that a connection may be idle between requests.", above=0)
    websocket_idle_timeout: float = setting(
        600.0, "Seconds that a chat WebSocket may be open without a request.", above=0
    )
    request_timeout: float | None = setting(
        None, "Seconds after which requests time out; a request may set a shorter timeout.", above=0
    )
    health_stall_timeout: float = setting(
        600.0,
        "Seconds that the engine may be stuck before /health is 503, so that the server is restarted; /ready is 503 "
        "after stall_timeout.",
        above=0,
    )
    shutdown_timeout: float = setting(30.0, "Seconds for running requests to finish after SIGTERM.", minimum=0)
    max_stored_responses: int = setting(
        1000, "Number of responses that are stored, and of chat completions; 0: none.", minimum=0
    )

    lora_modules: list[str] = setting(
        list, "Adapters to serve: name=path, or JSON with name, path and task_id. Requests name them as their model."
    )
    lora_dir: str | None = setting(
        None, "Folder of adapters, one directory each, which is watched: what appears there is served under its name."
    )
    lora_admin_key: str | None = setting(
        None, "Key for /v1/load_lora_adapter and /v1/unload_lora_adapter. Unset: these are refused.", secret=True
    )

    files_dir: str | None = setting(
        None, "Folder for the files of /v1/files and /v1/batches. Unset: neither is served."
    )
    max_files_bytes: int = setting(10 << 30, "Maximum size of all files in files_dir.", minimum=1)
    batch_concurrency: int = setting(32, "Requests of a batch (/v1/batches) that run at once.", minimum=1)

    response_role: str = setting("assistant", "Role of replies to a generation prompt.")
    tool_call_parser: str = setting(
        "auto",
        "How the model writes tool calls; auto: found out from the chat template, none: calls stay text. vLLM's names "
        "are known, too.",
        choices=("auto", "none", *TOOL_NAMES),
    )
    reasoning_parser: str = setting(
        "auto",
        "How the model marks its reasoning; auto: found out from the chat template, none: it stays in the answer.",
        choices=("auto", "none", *REASONING_NAMES),
    )
    enable_auto_tool_choice: bool = setting(True, "Let the model choose whether to call tools (tool_choice auto).")
    default_chat_template_kwargs: dict[str, Any] = setting(
        dict, "Variables of the chat template for requests that do not set them, as JSON."
    )
    trust_request_chat_template: bool = setting(False, "Accept chat templates in requests.")
    exclude_tools_when_tool_choice_none: bool = setting(
        False, "Leave tools out of the chat template when tool_choice is none."
    )
    enable_force_include_usage: bool = setting(False, "End every stream with a usage chunk, requested or not.")
    enable_prompt_tokens_details: bool = setting(True, "Return the number of cached prompt tokens in usage.")
    enable_tokenizer_info_endpoint: bool = setting(True, "Serve /tokenizer_info.")
    return_tokens_as_token_ids: bool = setting(
        False, "Write tokens as token_id:7 in log-probabilities, unless a request says otherwise."
    )
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
        for name, value in (("tool_call_parser", self.tool_call_parser), ("reasoning_parser", self.reasoning_parser)):
            if value in VLLM_FORMATS:
                message = (
                    f"{name}={value!r} is a format of vLLM that Kvasir does not read. 'auto' finds the model's out"
                )
                raise ConfigError(f"{message}, and 'none' leaves it in the text.")
        for name, known in server_settings().items():
            known.check(name, getattr(self, name))
            if list in known.types and not all(isinstance(item, str) for item in getattr(self, name)):
                raise ConfigError(f"{name} must be a list of strings.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both ssl_keyfile and ssl_certfile.")
        if self.port == 0 and self.api_server_count > 1:
            raise ConfigError("api_server_count above 1 needs a fixed port: set port.")

    @property
    def path_prefix(self) -> str:
        """root_path as it stands before a path: empty, or with a slash at its beginning alone."""
        return f"/{self.root_path.strip('/')}".rstrip("/")


@cache
def server_settings() -> dict[str, SettingField]:
    return settings_of("server", ServerConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for the server's settings and the engine's."""
    group = parser.add_argument_group("server")
    # An older flag of vLLM. It stands before its successor, which a --config file means by enable_log_requests.
    hidden: Any = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    group.add_argument("--disable-log-requests", dest="enable_log_requests", action="store_false", **hidden)
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
            found += _json_list(self.dest, word) if word.startswith("[") else [word]
        setattr(namespace, self.dest, found)


def _json_list(name: str, text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}={text!r} is not a JSON list ({error}).") from None
    return [str(item) for item in found]


def from_namespace(namespace: argparse.Namespace) -> ServerConfig:
    """The server's settings among parsed arguments."""
    known = server_settings()
    given = {f.name: getattr(namespace, f.name) for f in fields(ServerConfig) if hasattr(namespace, f.name)}
    return ServerConfig(**{name: _value(name, known[name], value) for name, value in given.items()})


def with_starter_model(namespace: argparse.Namespace, config: ServerConfig) -> ServerConfig:
    """If no model was named, name the starter model, under its own name instead of a path."""
    if not hub.use_starter_by_default(namespace):
        return config
    return replace(config, served_model_name=config.served_model_name or [hub.STARTER])


def _value(name: str, known: SettingField, value: Any) -> Any:
    if list in known.types and isinstance(value, str):  # one word in a --config file
        return [value]
    return from_python(name, known, value)
