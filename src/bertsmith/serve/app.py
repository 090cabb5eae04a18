"""The whole server as one ASGI application."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith import __version__
from bertsmith.serve.compatible_routes import openai_routes, tei_routes
from bertsmith.serve.desk import REQUEST_ID, Desk
from bertsmith.serve.gate import Gate
from bertsmith.serve.metrics import Metrics
from bertsmith.serve.models import Models, ServedModel
from bertsmith.serve.own_routes import look_routes, own_routes
from bertsmith.serve.page_files import page_routes
from bertsmith.serve.refusals import OUR_FAULT, Refusal, error_reply
from bertsmith.serve.service import Service
from bertsmith.serve.settings import Settings
from bertsmith.serve.shapes import ModelReply, ModelsReply, StatusReply, errors_of

ASKING_FAILS = (401, 404, 408, 413, 415, 422, 429, 500, 503, 504)
WATCHING_FAILS = (401, 503)
ABOUT = (
    "What trained BERTs say of texts. Offsets count Unicode code points. Every reply carries x-request-id; "
    "every failure is an ErrorReply of one line."
)


class Application:
    """The server: an ASGI application that can be asked to finish."""

    def __init__(self, settings: Settings) -> None:
        metrics = Metrics()
        self.models = Models(settings, metrics.batch)
        self.service = Service(self.models, settings.limits)
        asking = _asking(self.service)
        watching = _watching(self, metrics)
        api = _api(self.service)
        for router in asking:
            api.include_router(router, responses=errors_of(*ASKING_FAILS))
        api.include_router(watching, responses=errors_of(*WATCHING_FAILS))
        api.include_router(page_routes())
        api.state.paths = paths_by_method((*asking, watching))
        routes = [path for paths in api.state.paths.values() for path in paths]
        self.gate = Gate(
            Desk(api, asking, most_texts=settings.limits.texts),
            self.service,
            settings=settings,
            metrics=metrics,
        )
        self.gate.routes = frozenset(routes)
        self._entry: ASGIApp = self.gate
        if settings.allow_origins:
            self._entry = _for_origins(self.gate, settings.allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self._entry(scope, receive, send)

    def drain(self) -> None:
        """From now on finish what was accepted, and accept nothing more."""
        self.gate.is_draining = True


def paths_by_method(routers: Iterable[APIRouter]) -> dict[str, list[str]]:
    """What there is to ask for, beside the page's own files."""
    found: dict[str, list[str]] = {"POST": [], "GET": ["/", "/openapi.json"]}
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in route.methods or ():
                found[method].append(route.path_format)
    return found


def _api(service: Service) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.models.close()

    # FastAPI's own pages of documentation load scripts from elsewhere.
    api = FastAPI(
        title="bertsmith",
        version=__version__,
        description=ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    api.add_exception_handler(Refusal, _refused)
    api.add_exception_handler(HTTPException, _unrouted)
    api.add_exception_handler(Exception, _broken)
    return api


def _asking(service: Service) -> tuple[APIRouter, ...]:
    """Routes for those who ask the models."""
    return own_routes(service), look_routes(service), openai_routes(service), tei_routes(service)


def _watching(application: Application, metrics: Metrics) -> APIRouter:
    """Routes for those who look after the server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> StatusReply:
        """Whether the process answers at all."""
        return StatusReply(status="ok")

    @router.get("/ready")
    async def ready() -> StatusReply:
        """Whether it takes requests."""
        if application.gate.is_draining:
            raise Refusal(503, "this server is shutting down")
        return StatusReply(status="ok")

    @router.get("/models")
    async def models() -> ModelsReply:
        """What each model is and can do."""
        return ModelsReply(models=[_model(each) for each in application.models])

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def counts() -> Response:
        """Counts for Prometheus."""
        return metrics.reply(application.models, application.gate.open_requests)

    return router


def _model(model: ServedModel) -> ModelReply:
    facts = model.facts
    return ModelReply(
        name=model.name,
        abilities=list(facts.abilities),
        labels=list(facts.labels),
        mask=facts.mask,
        pairs=facts.takes_pairs,
        single=facts.takes_single,
        loaded=model.is_loaded,
        layers=facts.layers,
        heads=facts.heads,
        width=facts.width,
        longest=facts.longest,
    )


def _for_origins(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type", "x-request-id"],
        expose_headers=["x-request-id", "retry-after"],
    )


# ---- failures, all in one shape; the gate gives those of its own the same


async def _refused(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, Refusal)
    return _told(request, failure)


async def _unrouted(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    headers = dict(failure.headers or {})
    if failure.status_code == 404:
        there = "; ".join(f"{method} {', '.join(paths)}" for method, paths in request.app.state.paths.items())
        return _told(request, Refusal(404, f"there is no such path here; there are {there}"))
    if failure.status_code == 405:
        methods = sorted(headers["Allow"].split(", "))
        if "GET" in methods:  # the desk makes one of the other
            methods.append("HEAD")
        headers["Allow"] = ", ".join(methods)
        return _told(request, Refusal(405, f"this path takes {' or '.join(methods)}", headers=headers))
    return _told(request, Refusal(failure.status_code, failure.detail, headers=headers))


async def _broken(request: Request, failure: Exception) -> Response:
    del failure  # the gate logs it
    return _told(request, Refusal(500, OUR_FAULT))


def _told(request: Request, refusal: Refusal) -> Response:
    return error_reply(refusal, request.scope[REQUEST_ID])
