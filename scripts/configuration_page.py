"""Write docs/configuration.md from the settings. A test checks that the page is up to date.

usage: configuration_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

from kvasir.config.args import OLD_NAMES, flag
from kvasir.config.engine import EngineConfig, SettingField, all_settings
from kvasir.config.env import SETTING_ALIASES, VARIABLES
from kvasir.server.config import server_settings

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"

HEAD = """\
# Configuration

<!-- Generated from kvasir/config/engine.py by `make docs`. -->

A setting has one name everywhere: a keyword of `LLM(...)` and `EngineArgs(...)`, a command-line flag, and a key of the
YAML file given with `--config`. Flags override the file. Sizes may be written `4096`, `1k` (1000), `1K` (1024) or
`25.6k`; mappings are JSON on the command line. A boolean setting has two flags: `--enable-prefix-caching` and
`--no-enable-prefix-caching`. A wrong name, type or value is an error that says what is possible.

```python
LLM("path/to/model", max_model_len="32k", enable_prefix_caching=False)
```
```yaml
# kvasir bench throughput --config settings.yaml --seed 1
model: path/to/model
max-model-len: 32k
enable-prefix-caching: false
```
"""

SERVER = """\
## Server

Flags of `kvasir serve`, and keys of its `--config` file; see [server.md](server.md). A list is written as several
values (`--api-key A B`) or as one JSON list.

| setting | default | meaning |
|---|---|---|
"""

ENVIRONMENT = """\
## Environment variables

| variable | values | meaning |
|---|---|---|
"""

HUB = """\

huggingface_hub reads `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`. Kvasir sets `ONEDNN_MAX_CPU_ISA`,
unless it is set already, on virtual machines that announce AMX but do not describe it.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, cls in get_type_hints(EngineConfig).items():
        settings = {name: known for name, known in all_settings().items() if known.section == section}
        parts.append(f"## {section.capitalize()}\n\n{cls.__doc__}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts[-1] += "".join(row(name, known) for name, known in settings.items())
    parts.append(SERVER + "".join(row(name, known) for name, known in server_settings().items()))
    parts.append(ENVIRONMENT + "".join(variable_row(v.name, v.values, v.help, v.aliases) for v in VARIABLES) + HUB)
    parts.append(older_names())
    return "\n".join(parts)


def row(name: str, known: SettingField) -> str:
    rule = known.setting
    default = rule.auto or ("-" if known.default in (None, {}, [], "") else f"`{known.default}`")
    meaning = rule.help
    if rule.choices:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in rule.choices) + "."
    if rule.refused:
        meaning += f" *Not available: {rule.refused}*"
    flags = ", ".join(f"`{short}`" for short in rule.short)
    return f"| `{name}`{', ' + flags if flags else ''} | {default} | {meaning} |\n"


def variable_row(name: str, values: tuple[str, ...], help: str, aliases: tuple[str, ...]) -> str:
    also = f" Also read: {', '.join(f'`{alias}`' for alias in aliases)}." if aliases else ""
    possible = f"`{values[0]}` (default), {', '.join(f'`{value}`' for value in values[1:])}" if values else "text"
    return f"| `{name}` | {possible} | {help}{also} |\n"


def older_names() -> str:
    lines = [f"| `{old}`, `{flag(old)}` | `{new}`, entry `{key}` |\n" for old, (new, key, _) in OLD_NAMES.items()]
    lines += [f"| environment variable `{old}` | `{new}` |\n" for old, new in SETTING_ALIASES.items()]
    return "## Older vLLM names\n\nAccepted, with a warning.\n\n| older name | setting |\n|---|---|\n" + "".join(lines)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
