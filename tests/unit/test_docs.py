"""The documentation: generated pages are up to date, every endpoint is described, no link leads nowhere."""

from __future__ import annotations

import re
import runpy

import pytest
import yaml

from tests.conftest import ROOT

DOCS = ROOT / "docs"


def test_the_page_of_metrics_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "metrics_page.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run `make docs`"


def test_the_site_has_every_page() -> None:
    """`make docs-site` builds it and fails on any warning."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = set(re.findall(r"[\w/]+\.md", str(nav)))
    assert shown == {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}


def test_every_endpoint_is_described() -> None:
    from kvasir.server.app import make_app
    from kvasir.server.config import ServerConfig
    from kvasir.server.state import ServerState

    text = "".join(file.read_text(encoding="utf-8") for file in DOCS.glob("*.md"))
    app = make_app(ServerState(ServerConfig(), "model"))
    paths = {re.sub(r"\{.*", "", path) for path in app.openapi()["paths"]}
    assert len(paths) > 10
    assert sorted(path for path in paths if path not in text) == []


PAGES = ["README.md", "CONTRIBUTING.md", *(str(file.relative_to(ROOT)) for file in DOCS.rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]*))?\)", file.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        linked = file.parent / target if target else file
        assert linked.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page} links to {target}#{anchor}"


COMING = ("structured/", "multimodal/", "transfer/")  # folders of features that are planned
DESIGN = [
    "docs/architecture.md",
    "docs/glossary.md",
    *sorted(page for page in PAGES if page.startswith("docs/design/")),
]


@pytest.mark.parametrize("page", DESIGN)
def test_named_files_exist(page: str) -> None:
    """A file is named from the repository's or the package's root, or, after another one, from that one's folder."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    folder = ROOT
    for name in re.findall(r"`([\w/]+\.(?:py|json))`", text):
        if name.startswith(("/", *COMING)) or "NAME" in name or name in ("config.json", "host.py", "device.py"):
            continue
        found = next((path for base in (ROOT, ROOT / "kvasir", folder) if (path := base / name).exists()), None)
        assert found is not None, f"{page} names {name}"
        folder = found.parent
