"""`gptoss-lab serve`: the JSON API in front of a model, on this machine alone unless told otherwise."""
from __future__ import annotations

import functools
import ipaddress
from typing import Annotated, Any

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.chat import RANDOM_TOKENS, TRAINED_TOKENS
from gptoss_lab.cli.output import note

Host = Annotated[str, typer.Option(help="Address to listen on; the default is reached from this machine alone.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]
Key = Annotated[str | None, typer.Option(envvar="GPTOSS_LAB_API_KEY", help="Key that clients must send.")]
Name = Annotated[str | None, typer.Option("--model", help="Name of the model for clients. Default: the config's.")]
Format = Annotated[str, typer.Option("--format", help="Chat format: harmony, chatml, or a plug-in's name.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer together.")]
MaxTokens = Annotated[int | None, typer.Option(
    min=1,
    help=f"New tokens where a request names none. Default: {TRAINED_TOKENS}, or {RANDOM_TOKENS} with random weights.",
)]
Batch = Annotated[int, typer.Option(min=1, help="Answers written at once.")]
Queue = Annotated[int, typer.Option(min=0, help="Requests that may wait beyond those.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole answer.")]
Positions = Annotated[int | None, typer.Option(
    min=1, help="Tokens that all caches together can hold. Default: what fits on a GPU, no limit on the CPU.")]


def serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: Key = None,
    model: Name = None,
    chat_format: Format = "harmony",
    context: Context = 131072,
    max_tokens: MaxTokens = None,
    batch: Batch = 64,
    queue: Queue = 64,
    timeout: Timeout = 600.0,
    positions: Positions = None,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    dtype: options.Precision = "auto",
    forward: options.Forward = "auto",
) -> None:
    """Answer /v1/chat/completions and /v1/responses until interrupted. The engine runs in its own process."""
    from gptoss_lab.cli.loading import choose_checkpoint, pick_device, tells
    from gptoss_lab.config import ModelConfig

    library = _library()
    path, random = choose_checkpoint(checkpoint)
    name = model or ModelConfig.load(path).name or path.name
    settings = _settings(
        library, model=name, chat_format=chat_format, api_key=api_key, max_context=context, max_running=batch,
        max_queue=queue, request_timeout=timeout,
        default_tokens=max_tokens or (RANDOM_TOKENS if random else TRAINED_TOKENS),
    )
    precision = "bfloat16" if dtype == "auto" else dtype
    where = pick_device(device)
    build = functools.partial(library.load_loop, str(path), str(where), precision, batch, positions, forward=forward,
                              say=note if tells(where, forward) else None)
    if random:
        note("the weights are random: answers are noise, only the machinery is real")
    if api_key is None and not _is_loopback(host):
        note(f"warning: {host} can be reached by others and no --api-key is set")
    _run(library.create_app(settings, build), host, port, name)


def _library() -> Any:
    """The library behind this command, or what to install for it."""
    try:
        import gptoss_lab.serve.app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gptoss_lab"):
            raise
        raise RuntimeError(f"{error.name} is not installed; `pip install 'gptoss-lab[serve]'` adds what serving needs"
                           ) from None
    return gptoss_lab.serve


def _settings(library: Any, **values: Any) -> Any:
    """Settings from options; a value out of range is a wrong command line."""
    try:
        return library.Settings(**values)
    except library.SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def _run(app: Any, host: str, port: int, model: str) -> None:
    """Listen, start the engine, serve. Raises what kept the engine from starting; Ctrl-C ends it."""
    import asyncio
    import socket

    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        raise RuntimeError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    shown = f"[{host}]" if ":" in host else host

    async def run() -> None:
        async with app.state.running():
            listening.listen(128)  # from here on a client may connect: whoever reads the line below may do so at once
            note(f"{model} at http://{shown}:{listening.getsockname()[1]}/v1")
            config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=5)
            await uvicorn.Server(config).serve(sockets=[listening])

    asyncio.run(run())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
