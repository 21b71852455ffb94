"""`kvindexer pods`: who is registered, and how far each rank's picture can be trusted."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.cli import screen
from app.cli.connection import DEFAULT_URL, ApiKey, AsJson, Connection, Url, pod_path

group = typer.Typer(help="List, add and remove pods.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The pod's name.", metavar="POD")]


@group.command("list")
def list_pods(url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Every registered pod, one line a rank, and why those are not live that are not.

    Examples:

        kvindexer pods list

        kvindexer pods list --json | jq '.pods[].ranks[].state'
    """
    with Connection(url, api_key) as indexer:
        answer = indexer.get("/v1/pods")
    if as_json:
        return screen.print_json(answer)
    return _print_pods(answer["pods"])


@group.command()
def add(
    pod: Name,
    model: Annotated[str, typer.Option("--model", "-m", help="The model that it serves.")],
    zmq: Annotated[
        str | None, typer.Option(help="Where rank 0 publishes its events; none: they come by HTTP.")
    ] = None,
    replay: Annotated[str | None, typer.Option(help="Where rank 0 replays what was missed.")] = None,
    lora: Annotated[str | None, typer.Option(help="Adapter of events that name none.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a block.")] = None,
    topic: Annotated[str, typer.Option(help="ZMQ topic of its events.")] = "",
    dp_size: Annotated[int, typer.Option(min=1, help="Data-parallel ranks; rank r is at port + r.")] = 1,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Register a pod. The same again changes nothing; another model or endpoint starts it empty.

    Examples:

        kvindexer pods add pod-a -m llama-3 --zmq tcp://10.0.0.7:5557 --replay tcp://10.0.0.7:5558

        kvindexer pods add pod-b -m llama-3 --dp-size 4 --zmq tcp://10.0.0.8:5557
    """
    body: dict[str, Any] = {"model": model, "topic": topic, "dp_size": dp_size}
    optional = {"lora": lora, "block_size": block_size, "zmq_endpoint": zmq, "replay_endpoint": replay}
    body |= {name: value for name, value in optional.items() if value is not None}
    with Connection(url, api_key) as indexer:
        answer = indexer.put(pod_path(pod), body)
    if as_json:
        return screen.print_json(answer)
    return _print_pods([answer])


@group.command()
def remove(pod: Name, url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Forget a pod and all that it holds.

    Examples:

        kvindexer pods remove pod-a
    """
    with Connection(url, api_key) as indexer:
        indexer.delete(pod_path(pod))
    if as_json:
        return screen.print_json({"removed": pod})
    return typer.echo(f"{pod} is removed")


def _print_pods(pods: list[dict[str, Any]]) -> None:
    rows = [
        (
            pod["pod"],
            rank["dp_rank"],
            pod["model"] + (f" + {pod['lora']}" if pod["lora"] else ""),
            pod["block_size"],
            rank["state"],
            rank["last_seq"],
            screen.age(rank["last_event_age_s"]),
            screen.tiers(rank["blocks"]),
            rank["gaps"],
            rank["rejected"],
            pod["zmq_endpoint"],
        )
        for pod in pods
        for rank in pod["ranks"]
    ]
    columns = (
        "pod",
        "#rank",
        "model",
        "#block",
        "state",
        "#seq",
        "#last event",
        "blocks",
        "#gaps",
        "#rejected",
        "zmq",
    )
    screen.print_table(columns, rows)
    for pod in pods:
        for rank in pod["ranks"]:
            if rank["state"] != "live" and rank["cause"]:
                typer.echo(f"{pod['pod']} rank {rank['dp_rank']} is {rank['state']}: {rank['cause']}")
