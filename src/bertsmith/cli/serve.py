"""`bertsmith serve`: serve models over HTTP, with a playground."""

import logging
import os
import platform
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Option, echo

from bertsmith.cli import options
from bertsmith.core.errors import UserError
from bertsmith.inference.embedded_models import embedded_models

if TYPE_CHECKING:
    from bertsmith.inference.loaded_model import Precision
    from bertsmith.serve.server_config import ServerConfig

MODEL_NAME = re.compile(r"[\w./-]+")
"""Pattern of model names that need no quotes in a URL, a log or a list."""
KEY_VARIABLE = "BERTSMITH_API_KEY"
KEPT_SHAPES = 64
"""Maximum number of matrix-product shapes that each thread caches, at up to half a megabyte each.

By default torch caches 1,024 for every thread of every model, which adds up to gigabytes of memory."""
NAMING = "write NAME=FOLDER, for example sst2=runs/sst2, with letters, digits, . _ / or - in the name"

log = logging.getLogger("bertsmith.serve")


def serve(
    model: Annotated[
        list[str] | None,
        Option(
            "--model",
            metavar="[NAME=]FOLDER",
            help="A model, repeatable; its name is the folder's unless given. Default: the embedded models.",
        ),
    ] = None,
    host: Annotated[
        str, Option(help="Address to listen at; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen at; 0 for any free one.")] = 8000,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    base: options.Base = None,
    truncate: Annotated[
        bool, Option("--truncate", help="Truncate long texts even if the client does not ask for it.")
    ] = False,
    api_key: Annotated[
        str | None,
        Option(envvar=KEY_VARIABLE, help="Key that clients must send; better given as a variable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, Option(metavar="ORIGIN", help="Web site that may send requests, repeatable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Name of this server in requests, repeatable; by default localhost and --host.",
        ),
    ] = None,
    timeout: Annotated[float, Option(min=0.1, help="Seconds for a request to be answered.")] = 30.0,
    batch_tokens: Annotated[int, Option(min=1, help="Tokens of a batch; 1 turns batching off.")] = 8192,
    queue_tokens: Annotated[int, Option(min=1, help="Maximum tokens that wait for a model.")] = 262_144,
    queue_requests: Annotated[int, Option(min=1, help="Maximum requests that wait for a model.")] = 1024,
    body_bytes: Annotated[int, Option(min=1, help="Maximum bytes of a request's body.")] = 2_097_152,
    texts: Annotated[int, Option(min=1, help="Maximum texts of a request.")] = 256,
    characters: Annotated[int, Option(min=1, help="Maximum characters of a text.")] = 50_000,
    connections: Annotated[int, Option(min=1, help="Maximum open connections.")] = 4096,
    http_processes: Annotated[
        int | None,
        Option(
            min=1,
            max=128,  # each uses some of the model process's file descriptors, 1024 at first
            help="Processes for HTTP in front of the model process; by default 1, or more for a GPU.",
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, with a playground.

    Example: bertsmith serve

    Example: bertsmith serve --model runs/sst2 --model qa=runs/squad2 --port 8000

    Example: bertsmith serve --model models/all-MiniLM-L6-v2 --truncate

    Example: BERTSMITH_API_KEY=secret bertsmith serve --model runs/sst2 --host 0.0.0.0

    Example: bertsmith serve --model runs/sst2 --allow-host bert.example.org

    Example: bertsmith serve --model runs/sst2 --device cuda --http-processes 8

    Example: curl localhost:8000/classify -H "Authorization: Bearer secret" -H "Content-Type:
    application/json" -d '{"texts": ["A warm day."], "model": "sst2"}'
    """
    from bertsmith.serve.server_config import Limits, ServerConfig, allowed_hosts, usable_key

    limits = Limits(
        body_bytes=body_bytes,
        texts=texts,
        characters=characters,
        batch_tokens=batch_tokens,
        queue_tokens=queue_tokens,
        queue_requests=queue_requests,
        request_seconds=timeout,
        connections=connections,
    )
    if platform.machine() == "x86_64":  # the cost on other machines was not measured
        os.environ.setdefault("LRU_CACHE_CAPACITY", str(KEPT_SHAPES))  # torch reads it when it loads, below
    if api_key is None:
        api_key = os.environ.get(KEY_VARIABLE)  # typer ignores a blank variable
    config = ServerConfig(
        models=named_folders(model or []),
        device=device,
        precision=cast("Precision", precision),  # opening a model rejects any other
        base=base,
        api_key="" if api_key is None else usable_key(api_key),
        allow_origins=tuple(allow_origin or ()),
        allow_hosts=allowed_hosts(host, allow_host or ()),
        truncates=truncate,
        limits=limits,
    )
    from bertsmith.serve.process_server import default_http_processes  # torch loads here, not for --help

    processes = http_processes or default_http_processes(device)
    if processes == 1:
        _serve_in_one_process(host, port, config)
    else:
        _serve_in_processes(host, port, config, processes)


def _serve_in_one_process(host: str, port: int, config: "ServerConfig") -> None:
    from bertsmith.serve.app import Application
    from bertsmith.serve.server import listen, serve

    with listen(host, port) as listening:
        application = Application(config)
        _tell_address(host, listening, config)
        serve(application, listening, limits=config.limits)


def _serve_in_processes(host: str, port: int, config: "ServerConfig", processes: int) -> None:
    from bertsmith.serve.process_server import ProcessServer
    from bertsmith.serve.server import listen_together

    listening = listen_together(host, port, processes)
    server = ProcessServer(config, listening)
    _tell_address(host, listening[0], config)
    server.run()


def _tell_address(host: str, listening: socket.socket, config: "ServerConfig") -> None:
    """Print the address and the models; everything after this line is JSON lines."""
    from bertsmith.serve.monitoring import write_json_lines

    address, port, *_ = listening.getsockname()
    shown = f"[{host}]" if ":" in host else host
    echo(f"http://{shown}:{port} serves {', '.join(config.models)}", err=True)
    write_json_lines()
    if not config.api_key and not ip_address(address).is_loopback:
        log.warning("no API key: anyone who can reach this address can use the server; set %s", KEY_VARIABLE)


def named_folders(given: list[str]) -> dict[str, Path]:
    """Return the folders by model name; the embedded models if no folder is given."""
    if not given:
        return embedded_models()
    folders: dict[str, Path] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        whole = Path(each).expanduser()
        if not equals or whole.is_dir():  # a folder's name may contain an equals sign
            name, folder = Path(os.path.normpath(whole.absolute())).name, each
        if not folder:
            raise UserError(f"is {each!r}", key="model", remedy=NAMING)
        if not MODEL_NAME.fullmatch(name):
            raise UserError(f"{name!r} is not a valid model name", where=f"`model={each}`", remedy=NAMING)
        if name in folders:
            remedy = f"rename one: `model=NAME={Path(folder).expanduser()}`"
            raise UserError(f"two models have the name {name}", key="model", remedy=remedy)
        folders[name] = Path(folder).expanduser()
    return folders
