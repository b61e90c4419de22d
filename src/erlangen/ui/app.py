"""The page as a Starlette application: a handful of addresses, all below the token, all read-only.

Who may read: whoever has the address. It holds a token of 256 random bits as its first part, so that relative links carry it,
no cookie is set (cookies of 127.0.0.1 are shared between ports), and a request without it is refused before anything else is
looked at. A Host other than this machine's own is refused, so that a foreign name that resolves to 127.0.0.1 (DNS rebinding)
finds nothing. The content security policy lets the browser talk to this server alone.
"""

from __future__ import annotations

import hmac
import json
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from erlangen.ui import calculator, views
from erlangen.ui.runs import Runs

HOSTS = ("127.0.0.1", "localhost")
#: runs in one comparison
MOST_COMPARED = 60
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),  # the address is the key: it goes nowhere else
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
#: address → (package, file, type); nothing else is served from disk
ASSETS = {
    "report.css": ("erlangen.report", "page.css", "text/css"),
    "ui.css": ("erlangen.ui", "ui.css", "text/css"),
    "ui.js": ("erlangen.ui", "ui.js", "text/javascript"),
    "figures.js": ("erlangen.report", "figures.js", "text/javascript"),
}


def make_app(runs: Runs, token: str) -> Starlette:
    """The application over ``runs`` that answers to those who know ``token``."""
    routes = [
        Route("/", _page),
        Route("/asset/{name}", _asset),
        Route("/plotly.js", _plotly),
        Route("/api/runs", _listing),
        Route("/api/run", _detail),
        Route("/api/compare", _compare),
        Route("/api/cost", _cost),
        Route("/api/noise", _noise),
    ]
    guards = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
        Middleware(Guard, token=token),
    ]
    app = Starlette(routes=[Mount(f"/{token}", routes=routes)], middleware=guards)
    app.state.runs = runs
    return app


class Guard:
    """Refuses requests without the token, and adds the headers that confine the page."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self.token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*headers, *HEADERS]}
            await send(message)

        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        first = scope["path"].lstrip("/").split("/", 1)[0].encode(errors="replace")
        if not hmac.compare_digest(first, self.token):
            refusal = PlainTextResponse("Open the address that erlangen ui printed; it holds a token.\n", 403)
            await refusal(scope, receive, confined)
            return
        await self.app(scope, receive, confined)


# --- addresses -----------------------------------------------------------------------------------------------------
# Plain functions: Starlette runs them in threads, so that a slow sum does not hold up the others.


def _page(request: Request) -> Response:
    return Response(_read("erlangen.ui", "ui.html"), media_type="text/html")


def _asset(request: Request) -> Response:
    found = ASSETS.get(request.path_params["name"])
    if found is None:
        raise HTTPException(404)
    package, name, kind = found
    return Response(_read(package, name), media_type=kind)


def _plotly(request: Request) -> Response:
    from plotly.offline import get_plotlyjs

    headers = {"cache-control": "private, max-age=86400"}
    return Response(get_plotlyjs(), media_type="text/javascript", headers=headers)


def _listing(request: Request) -> Response:
    runs: Runs = request.app.state.runs
    return _json({"folder": runs.root.name, "runs": [seen.row() for seen in runs.listing()]})


def _detail(request: Request) -> Response:
    seen = request.app.state.runs.one(request.query_params.get("name", ""))
    if seen is None:
        return _json({"error": "there is no such run"}, 404)
    try:
        return _json(views.detail(seen))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # a folder that was tampered with
        return _json({"error": f"the run cannot be shown: {error}"}, 500)


def _compare(request: Request) -> Response:
    names = request.query_params.getlist("name")
    if len(names) > MOST_COMPARED:
        return _json({"error": f"{len(names)} runs are chosen; choose at most {MOST_COMPARED}"}, 400)
    found = [request.app.state.runs.one(name) for name in names]
    return _json(views.comparison([seen for seen in found if seen is not None]))


def _cost(request: Request) -> Response:
    return _plan(calculator.cost, request)


def _noise(request: Request) -> Response:
    return _plan(calculator.noise, request)


def _plan(answer: Any, request: Request) -> Response:
    try:
        return _json(answer(request.query_params))
    except calculator.BadPlan as error:
        return _json({"error": str(error)}, 400)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, media_type="application/json")


def _read(package: str, name: str) -> str:
    return (resources.files(package) / "assets" / name).read_text(encoding="utf-8")
