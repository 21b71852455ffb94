"""What requests keep of their bodies takes room of app/serving/body_room.py, and is refused where there is none.

This layer lies behind keys and rates and in front of the short way and the routes, so no route can bypass it; bytes that
the connection itself reads are counted there (app/serving/short_connections.py). It counts the bytes that come, whatever
their Content-Length says, and a reader of the body meets the refusal as any other fault of the body. Once its answer
begins, a request keeps nothing: a stream calls `receive` only to learn when its client goes. Cost: `receive` and `send`
are wrapped for each request that goes to the routes.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import NoRoom
from app.serving.body_room import BodyRoom


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
