"""What requests keep of their bodies takes room of app/body_room.py, and is refused where there is none.

Stands inside of keys and rates and outside of both ways, so no route can go around it; what the connection read counts
there (app/short_connections.py). It counts what is asked for, as it comes, whatever Content-Length says; who reads a
body meets the refusal like any other fault of it. From the start of its answer on a request keeps nothing: a stream asks
on only to learn when its client goes. Cost: `receive` and `send` wrapped for each request on the way of the routes.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.body_room import BodyRoom
from app.errors import NoRoom


class BodyBound:
    def __init__(self, app: ASGIApp, room: BodyRoom) -> None:
        self._app = app
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        room = self._room
        held = 0
        is_answered = False

        async def receive_counted() -> Message:
            nonlocal held
            message = await receive()
            more = 0 if is_answered else len(message.get("body", b""))
            if more:
                if not room.take(more, held=held):
                    raise NoRoom(room.refuse())
                held += more
            return message

        async def send_noted(message: Message) -> None:
            nonlocal held, is_answered
            if message["type"] == "http.response.start":
                room.give_back(held)
                held, is_answered = 0, True
            await send(message)

        try:
            await self._app(scope, receive_counted, send_noted)
        finally:
            room.give_back(held)
