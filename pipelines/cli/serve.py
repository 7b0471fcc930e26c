# SPDX-License-Identifier: Apache-2.0
"""The command `visalign serve-reward`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from visalign.pipelines.shared.reward_options import parse_options

from .options import Options


def serve_reward(
    reward: Annotated[str, typer.Argument(help="Name of a reward, module:Name or file.py:Name.")],
    options: Options = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    token_env: Annotated[
        str | None, typer.Option(help="Environment variable with the token that clients must send.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Images scored together.", min=1)] = 64,
    timeout: Annotated[float, typer.Option(help="Time limit per batch, in seconds.", min=1.0)] = 120.0,
    threads: Annotated[int | None, typer.Option(help="CPU threads of the reward.", min=1)] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="Memory for requests and scoring in GiB. Default: half of the free memory.", min=0.0),
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(help="Pixels scored together. Default: from the memory.", min=1)
    ] = None,
    max_connections: Annotated[int, typer.Option(help="Maximum number of connections.", min=1)] = 256,
) -> None:
    """Serve a reward over HTTP. Clients use it as the reward `remote` with the option url."""
    from visalign.pipelines.serve_reward import serve_reward as serve

    def ready(limits: Any) -> None:
        typer.echo(
            f"Ready on http://{host}:{port} (Ctrl-C ends it): {limits.max_pixels / 1e6:.0f} megapixels "
            f"at once, {limits.max_total_bytes / 2**20:.0f} MiB under way.",
            err=True,
        )

    typer.echo(f"Loading {reward}.", err=True)
    serve(
        reward,
        parse_options(options or []),
        host=host,
        port=port,
        token_env=token_env,
        max_batch=max_batch,
        timeout=timeout,
        threads=threads,
        memory=memory,
        max_pixels=max_pixels,
        max_connections=max_connections,
        on_ready=ready,
    )
