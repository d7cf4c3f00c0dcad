"""``edgespec worker``: lend this box's devices to a verifier that runs on another."""

from __future__ import annotations

import ipaddress
import os

import click


@click.command()
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address of this box to listen on."
)
@click.option("--port", type=click.IntRange(1, 65535), default=50052, show_default=True, help="Port to listen on.")
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Threads where the CPU is what is lent.  [default: the CPUs this process may use]",
)
def worker(host: str, port: int, threads: int | None) -> None:
    """Lend this box's devices to a verifier that runs on another.

    Starts llama.cpp's RPC worker on every GPU, or on the CPU where there is none, until Ctrl-C. Elsewhere,
    `edgespec run --rpc HOST:PORT` then lists them as its own and spreads a verifier over them. One client at a time.

    The protocol knows neither passwords nor encryption: whoever reaches the port can use the device and crash the
    worker. Listen on another address than 127.0.0.1 only in a network you trust.
    """
    from edgespec.devices.probe import usable_threads
    from edgespec.owner import Owner
    from edgespec.verifiers.llama_rpc import check_free, check_supported, lent_devices, start_worker

    check_supported()
    num_threads = usable_threads(threads)
    address = check_free(host, port)
    if not ipaddress.ip_address(address).is_loopback:
        click.echo(f"warning: {address} can be reached from outside, and a worker asks nobody for a password", err=True)
    names = ", ".join(f"{device.name} ({device.description})" for device in lent_devices())
    click.echo(f"lending {names} at {address}:{port}; Ctrl-C ends it", err=True)
    os.dup2(2, 1)  # what the library says of its clients is no answer
    # On a thread of its own: signals reach Python only while the main thread is not inside the library.
    Owner().submit(lambda: start_worker(host, port, num_threads)).result()
