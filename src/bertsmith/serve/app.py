"""The whole server as one ASGI application: the middleware around the framework's routes."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.core.version import VERSION
from bertsmith.serve import middleware
from bertsmith.serve.api_errors import INTERNAL_ERROR, ApiError, error_response
from bertsmith.serve.early_rejection import EarlyRejection
from bertsmith.serve.json_route import JsonRoutes
from bertsmith.serve.look_routes import look_routes
from bertsmith.serve.model_registry import ModelRegistry, ServedModel, open_models
from bertsmith.serve.monitoring import Metrics
from bertsmith.serve.openai_api import openai_routes
from bertsmith.serve.playground import playground_routes
from bertsmith.serve.remote_models import RemoteModels
from bertsmith.serve.routes import prediction_routes
from bertsmith.serve.schemas import ModelDescription, ModelsResponse, StatusResponse, error_responses
from bertsmith.serve.server_config import ServerConfig
from bertsmith.serve.service import Service
from bertsmith.serve.tei_api import tei_routes

PREDICTION_ERRORS = (400, 401, 404, 408, 413, 415, 421, 422, 429, 500, 503, 504)
OPERATION_ERRORS = (400, 401, 421, 503)
DESCRIPTION = (
    "Predictions of trained BERTs for texts. Offsets count Unicode code points. Every response carries "
    "x-request-id; every failure is an ErrorResponse of one line."
)


class Application:
    """The server as an ASGI application, over its own models or a model process."""

    def __init__(self, config: ServerConfig, remote: RemoteModels | None = None) -> None:
        limits = config.limits
        self.status, self.metrics, self.remote = middleware.ServerStatus(), Metrics(), remote
        self.metrics.watch_requests(lambda: self.status.open_requests)
        if remote is None:
            local = open_models(config, self.metrics.count_batch)
            self.metrics.watch_models(local)
            self.models = ModelRegistry(local)
        else:
            self.models = ModelRegistry(remote.models)
        service = Service(self.models, limits, truncates=config.truncates)
        predictions = (
            prediction_routes(service),
            look_routes(service),
            openai_routes(service),
            tei_routes(service),
        )
        operation = operation_routes(self)
        self._api = _framework(self.models)
        for router in predictions:
            self._api.include_router(router, responses=error_responses(*PREDICTION_ERRORS))
        self._api.include_router(operation, responses=error_responses(*OPERATION_ERRORS))
        self._api.include_router(playground_routes())
        routes = [route for router in (*predictions, operation) for route in api_routes(router)]
        self._api.state.paths = paths_by_method(routes)

        # The innermost middleware first.
        json_routes = JsonRoutes(middleware.HeadAsGet(self._api), routes)
        self.body_limit = middleware.BodyLimit(middleware.Deadline(json_routes, limits), self.models, limits)
        app: ASGIApp = (
            middleware.ApiKey(self.body_limit, config.api_key) if config.api_key else self.body_limit
        )
        self.load_shedding = middleware.LoadShedding(app, self.status, self.models, limits)
        app = middleware.Draining(self.load_shedding, self.status)
        request_log = middleware.RequestLog(
            middleware.HostCheck(app, config.allow_hosts),
            self.status,
            self.metrics,
            limits=limits,
            routes=frozenset(("/", "/openapi.json", *(route.path_format for route in routes))),
        )
        cors = None
        if config.allow_origins:
            cors = middleware.Cors(
                request_log,
                allow_origins=config.allow_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )
        self._entry: ASGIApp = cors or request_log
        self.early_rejection = EarlyRejection(self.load_shedding, request_log, cors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request, or a message about the start or end of the server."""
        await (self._entry if scope["type"] == "http" else self._api)(scope, receive, send)


def api_routes(router: APIRouter) -> list[APIRoute]:
    """Return the API routes of a router."""
    return [route for route in router.routes if isinstance(route, APIRoute)]


def paths_by_method(routes: Iterable[APIRoute]) -> dict[str, list[str]]:
    """Return the known paths by method, without the files of the playground."""
    found: dict[str, list[str]] = {"POST": [], "GET": ["/", "/openapi.json"]}
    for route in routes:
        for method in route.methods or ():
            found[method].append(route.path_format)
    return found


def operation_routes(application: Application) -> APIRouter:
    """Return the routes for operators of the server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> StatusResponse:
        """Return 200 while the process is alive."""
        return StatusResponse(status="ok")

    @router.get("/ready")
    async def ready() -> StatusResponse:
        """Return 200 if the server accepts requests, else 503."""
        if application.status.is_draining:
            raise ApiError(503, "this server is shutting down")
        if application.remote is not None:
            await application.remote.check_alive()
        return StatusResponse(status="ok")

    @router.get("/models")
    async def models() -> ModelsResponse:
        """Describe each model and its abilities."""
        return ModelsResponse(models=[_description(each) for each in application.models])

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        own, remote = application.metrics, application.remote
        text = own.text() if remote is None else await remote.metrics(own.samples())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _description(model: ServedModel) -> ModelDescription:
    info = model.info
    return ModelDescription(
        name=model.name,
        abilities=list(info.abilities),
        labels=list(info.labels),
        mask=info.mask,
        pairs=info.takes_pairs,
        single=info.takes_single,
        loaded=model.is_loaded,
        layers=info.layers,
        heads=info.heads,
        width=info.width,
        longest=info.max_tokens,
    )


def _framework(models: ModelRegistry) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        models.close()

    # FastAPI's own documentation pages load scripts from other sites.
    api = FastAPI(
        title="bertsmith",
        version=VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat whatever Host the request named
    )
    api.add_exception_handler(ApiError, _on_api_error)
    api.add_exception_handler(HTTPException, _on_http_exception)
    api.add_exception_handler(Exception, _on_exception)
    return api


# ---- errors below the middleware, in the same shape as the middleware's own


async def _on_api_error(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, ApiError)
    return _response(request, failure)


async def _on_http_exception(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, HTTPException)
    headers = dict(failure.headers or {})
    if failure.status_code == 404:
        paths = "; ".join(
            f"{method} {', '.join(several)}" for method, several in request.app.state.paths.items()
        )
        return _response(request, ApiError(404, f"this path does not exist; the paths are {paths}"))
    if failure.status_code == 405:
        methods = sorted(headers["Allow"].split(", "))
        if "GET" in methods:  # `HeadAsGet` answers HEAD, too
            methods.append("HEAD")
        headers["Allow"] = ", ".join(methods)
        return _response(
            request, ApiError(405, f"this path supports {' or '.join(methods)} only", headers=headers)
        )
    return _response(request, ApiError(failure.status_code, failure.detail, headers=headers))


async def _on_exception(request: Request, failure: Exception) -> Response:
    del failure  # the middleware logs it
    return _response(request, ApiError(500, INTERNAL_ERROR))


def _response(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope[middleware.REQUEST_CONTEXT].request_id)
