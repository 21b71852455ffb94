"""A client of the indexer for routers: typed, with a budget of time, and open when the indexer fails.

    client = AsyncClient("http://indexer:8080")
    answer = await client.route(Prompt(model="llama-3", token_ids=ids), pods=ready, loads=loads)
    pod = answer.pod or my_own_choice(ready)

A router must go on routing without its indexer. So `match`, `route` and `prefixes` never raise for an indexer that is
down, late or overloaded, or that knows no such pod yet: they give an empty answer with `degraded` set and `cause`
saying why, within `ClientSettings.budget_s`, and after a few failures in a row without trying at all
(app/client/circuit.py). Calls whose failure a caller must know about (events, pods, stats) raise Unresponsive
instead. A request that is wrong raises Refused from every call, because trying again cannot help.

`Client` is the same without an event loop. Nothing here imports the server, the service or the index; the native
core is only loaded by `Prompt.hashed`, which computes the prefix hashes on the router's side.
"""

from app.client.asynchronous import AsyncClient
from app.client.blocking import Client
from app.client.calls import ClientSettings
from app.client.circuit import Circuit, CircuitState
from app.client.values import (
    Candidate,
    EventsAnswer,
    Hint,
    Load,
    MatchAnswer,
    MatchRow,
    PodAnswer,
    PrefixesAnswer,
    Prompt,
    Rank,
    RejectedEvent,
    RouteAnswer,
)

__all__ = [
    "AsyncClient",
    "Candidate",
    "Circuit",
    "CircuitState",
    "Client",
    "ClientSettings",
    "EventsAnswer",
    "Hint",
    "Load",
    "MatchAnswer",
    "MatchRow",
    "PodAnswer",
    "PrefixesAnswer",
    "Prompt",
    "Rank",
    "RejectedEvent",
    "RouteAnswer",
]
