"""A TCP proxy between a client and its server, whose connections a test breaks: at a moment, or at a statement.

    async with proxied(database_url) as proxy:
        database = Database(proxy.address)
        proxy.strike(Strike(after=b"'dispatched', c.status", at=b"COMMIT", arrives=True, how="reset"))

`reset` cuts both sides with RST, `close` ends them with FIN, `silence` forwards nothing any more, in either direction,
and says nothing: both sides keep a connection that looks alive, as through a stalled pooler or sidecar.
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

How = Literal["reset", "close", "silence"]
Direction = Literal["up", "down"]
"""Up: from the client to the server."""

_REMEMBERED = 64 * 1024


@dataclass
class Strike:
    """What breaks a connection: that its client sent `after`, and later `at`.

    Where it `arrives`, the server gets it and answers, and the answer is lost; else the server never gets it.
    """

    after: bytes
    at: bytes
    arrives: bool
    how: How
    struck: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Link:
    """One connection through the proxy."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    sent: bytes = b""
    """The end of what the client sent since the last strike was found."""
    silent: bool = False
    losing_the_answer: Strike | None = None

    def end(self, how: How) -> None:
        if how == "silence":
            self.silent = True
            return
        for writer in (self.client, self.server):
            if how == "reset":
                _reset(writer)
            else:
                writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Proxy:
    """See the module. Several faults may hold at once; `heal` ends those that last."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.address = ""
        """Its own, in the form of that which it stands for."""
        self.accepted = 0
        """Connections, over all time."""
        self._links: set[_Link] = set()
        self._strikes: list[Strike] = []
        self._delay: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._silent: set[Direction] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # Faults

    def strike(self, strike: Strike) -> Strike:
        """Break one connection, once, as the strike says."""
        self._strikes.append(strike)
        return strike

    def break_all(self, how: How) -> None:
        """Break every connection that there is; new ones are accepted."""
        for link in list(self._links):
            link.end(how)

    def servers_notice(self) -> None:
        """Cut the servers' side of the silent connections, as their own timeouts would: until then they hold locks for
        clients that are gone. The clients still hear nothing."""
        for link in [each for each in self._links if each.silent]:
            _reset(link.server)

    def delay(self, seconds: float, *directions: Direction) -> None:
        """From now on whatever is sent in these directions arrives that much later."""
        self._delay |= dict.fromkeys(directions, seconds)

    def silence(self, *directions: Direction) -> None:
        """Forward nothing in these directions, on connections old and new, until `heal`; nobody is told."""
        self._silent |= set(directions)

    def heal(self) -> None:
        """Delays and silence end for new connections. What was swallowed stays so: such a connection is of no use."""
        for link in self._links:
            link.silent = link.silent or bool(self._silent)
        self._delay = {"up": 0.0, "down": 0.0}
        self._silent.clear()

    # Forwarding

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, up_writer)
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._pump(link, reader, up_writer, "up")),
            asyncio.create_task(self._pump(link, up_reader, writer, "down")),
        ]
        self._tasks.update(pumps)
        try:
            await asyncio.wait(pumps)
        finally:
            self._links.discard(link)
            self._tasks.difference_update(pumps)
            link.end("reset" if link.silent else "close")

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self._delay[direction]:
                    await asyncio.sleep(self._delay[direction])
                if link.silent or direction in self._silent:
                    link.silent = True
                    continue
                if direction == "up" and (strike := self._found(link, data)) and not strike.arrives:
                    self._end(link, strike)
                    continue
                if direction == "down" and link.losing_the_answer:
                    self._end(link, link.losing_the_answer)
                    continue
                writer.write(data)
                await writer.drain()
        if not link.silent:
            with suppress(OSError):
                writer.write_eof()

    def _found(self, link: _Link, data: bytes) -> Strike | None:
        link.sent = (link.sent + data)[-_REMEMBERED:]
        for strike in self._strikes:
            begun = link.sent.find(strike.after)
            if begun >= 0 and link.sent.find(strike.at, begun + len(strike.after)) >= 0:
                self._strikes.remove(strike)
                link.sent = b""
                link.losing_the_answer = strike if strike.arrives else None
                return strike
        return None

    def _end(self, link: _Link, strike: Strike) -> None:
        link.losing_the_answer = None
        link.end(strike.how)
        strike.struck.set()

    async def aclose(self) -> None:
        for link in list(self._links):
            link.end("reset")
        if self._tasks:
            await asyncio.wait(self._tasks)


@asynccontextmanager
async def proxied(address: str, host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy before the server at `address`, a URL or `host:port`, that listens on `host`."""
    parts = urlsplit(address if "//" in address else f"//{address}")
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(parts.hostname, parts.port)
    server = await asyncio.start_server(proxy.serve, host, 0)
    user, at, _ = parts.netloc.rpartition("@")
    own = f"{user}{at}{host}:{server.sockets[0].getsockname()[1]}"
    proxy.address = parts._replace(netloc=own).geturl().removeprefix("//")
    try:
        yield proxy
    finally:
        server.close()
        await proxy.aclose()
        await server.wait_closed()
