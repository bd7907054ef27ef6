"""What holds for every route, those that are added later too."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from packaging.requirements import Requirement

from kvasir.server.app import ROUTERS
from kvasir.server.http import StrictRoute
from kvasir.server.schema.base import Body

ROOT = Path(__file__).parents[3]
_WITHOUT_BODY = {"/ping", "/reset_prefix_cache"}  # they read none, so there is nothing to limit


def routes() -> list[Any]:
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def test_every_body_is_read_within_limits() -> None:
    """StrictRoute bounds a body's JSON before it is decoded, and Body its lists before they are validated."""
    posts = [route for route in routes() if route.methods & {"POST", "PUT", "PATCH"}]
    assert len(posts) > 15
    for route in posts:
        assert isinstance(route, StrictRoute) or route.path in _WITHOUT_BODY, route.path
        if route.body_field is not None:
            assert issubclass(route.body_field.field_info.annotation, Body), route.path


def test_routes_that_read_a_body_of_their_own_are_known() -> None:
    """They must limit it themselves: a form by read_form, /invocations by its two types."""
    own = {route.path for route in routes() if "requestBody" in (route.openapi_extra or {})}
    assert own == {"/v1/files", "/invocations"}


def test_uvicorn_has_a_bound() -> None:
    """server/protocol.py overrides methods of uvicorn's protocols and reads their attributes. They are no public
    interface: with another version, limits may silently not hold. Raise the bound when the hostile suite
    (tests/e2e/test_hostile_http.py) has passed with the new version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "uvicorn"]
    assert bound.specifier.contains(version("uvicorn")), "the installed version is not the one that was tried"
    assert not bound.specifier.contains("0.55.0") and not bound.specifier.contains("1.0.0"), "a bound from above"
