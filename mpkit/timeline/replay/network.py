"""Network: which ranks have issued which communication, and when the links serve it.

Every rank has a comm lane with two directions, out and in; on several nodes it has two such lanes, one to its node's
link and one to the network. A message occupies its sender's way out and its receiver's way in. A collective occupies
both ways of all its members, and those of both links if only some of them share a node. Requests are served in the
order in which they become ready: a message when it is sent (the receiver may ask later), a collective when its last
member arrives.

    a message of T seconds on the wire, ready at r, over a link of latency l:
        starts at s = max(r, sender's way out is free, receiver's way in is free - l)
        has left at s + T and has arrived at s + l + T
    a collective: starts when it is ready and every member's ways are free, and ends everywhere at once; an all-to-all
        of uneven parts takes as long as its busiest rank needs
"""

from heapq import heappop, heappush
from typing import NamedTuple

from mpkit.common.arrays import Array
from mpkit.devices.hardware import Hardware, Link
from mpkit.trace import Kind

Moment = tuple[float, int, int]
"""When which op of which rank asks: time, rank, op. No two are the same."""

_SEND, _RECV, _ALL_TO_ALL = int(Kind.SEND), int(Kind.RECV), int(Kind.ALL_TO_ALL)

Settled = tuple[int, int, float, float, float]
"""A rank's part of a communication, with its time: rank, op, start, end, issued."""


class _Route(NamedTuple):
    members: tuple[int, ...]  # for a message: sender, receiver
    link: Link
    is_message: bool
    seconds_a_byte: float  # of a message
    ways: tuple[int, ...]  # for each member, one per link that it uses


class _Request:
    """One message or one collective, and which of its members have issued it so far."""

    __slots__ = ("asked", "end", "key", "kind", "nbytes", "payloads", "route", "start")

    def __init__(self, kind: int, route: _Route, key: tuple[int, int, int]) -> None:
        self.kind = kind
        self.key = key
        self.route = route
        self.asked: list[Moment] = []
        self.nbytes = 0  # the largest payload
        self.payloads: dict[int, int] = {}  # of an all-to-all, by rank
        self.start = -1.0  # of a message that is served before its receiver has asked
        self.end = -1.0


class ReplayNetwork:
    """The links of some hardware, and what is under way on them."""

    def __init__(self, world_size: int, hardware: Hardware) -> None:
        self._world_size = world_size
        self._hardware = hardware
        self._routes: dict[int, _Route | None] = {}
        self._open: dict[tuple[int, int, int], _Request] = {}
        self._queue: list[tuple[Moment, _Request]] = []  # when each became ready
        self._parts: dict[tuple[int, int], dict[int, int]] = {}  # by rank and op, the bytes for each member
        # Until when each way is in use, by link and rank, the node's links first.
        self._out = [0.0] * world_size * 2
        self._in = [0.0] * world_size * 2

    def know(self, group: int, text: str) -> None:
        """Record the name of a group's number: "0,1,2,3" for a collective's group, "0>1#tag" for a message's."""
        if group not in self._routes:
            self._routes[group] = self._parse(text)

    def know_parts(self, rank: int, parts: Array) -> None:
        """Record what a rank's all-to-alls send to whom, (n,) of `SENT_PART`."""
        for op, member, nbytes in parts.tolist():
            self._parts.setdefault((rank, op), {})[member] = nbytes

    def ask(
        self, rank: int, op: int, kind: int, group: int, number: int, nbytes: int, now: float
    ) -> Settled | None:
        """Issue a rank's part of a communication at time `now`; return its times if they are known already."""
        route = self._routes[group]
        if route is None or rank not in route.members:
            return None  # the rank was killed before it wrote the name: never served
        key = (group, number, 0 if route.is_message else kind)
        request = self._open.get(key)
        if request is None:
            request = self._open[key] = _Request(kind, route, key)
        elif request.end >= 0:  # the message was on its way before its receiver asked
            del self._open[key]
            return rank, op, request.start, request.end, now
        moment = (now, rank, op)
        request.asked.append(moment)
        if kind == _RECV:
            return None
        if nbytes > request.nbytes:
            request.nbytes = nbytes
        if kind == _ALL_TO_ALL:
            request.payloads[rank] = nbytes
        if kind == _SEND:
            heappush(self._queue, (moment, request))
        elif len(request.asked) == len(route.members):
            del self._open[key]
            heappush(self._queue, (max(request.asked), request))
        return None

    def serve(self, before: Moment) -> list[Settled] | None:
        """Serve what became ready first, if that was before the given moment; None if there is nothing."""
        queue = self._queue
        if not queue or queue[0][0] >= before:
            return None
        (ready, *_), request = heappop(queue)
        return self._message(request, ready) if request.route.is_message else self._collective(request, ready)

    def _message(self, request: _Request, ready: float) -> list[Settled]:
        (source, _), link, _, seconds_a_byte, (way_out, way_in) = request.route
        wire, latency = request.nbytes * seconds_a_byte, link.latency
        start = max(ready, self._out[way_out], self._in[way_in] - latency)
        left = self._out[way_out] = start + wire
        arrived = self._in[way_in] = start + latency + wire
        asked = request.asked
        settled = [(rank, op, start, left if rank == source else arrived, now) for now, rank, op in asked]
        request.start, request.end = start, arrived
        if len(settled) == 2:
            self._open.pop(request.key, None)  # of a damaged trace, which has the message twice
        return settled

    def _collective(self, request: _Request, ready: float) -> list[Settled]:
        members, *_, ways = request.route
        start = max(ready, *(max(self._out[way], self._in[way]) for way in ways))
        end = start + self._hardware.time(request.kind, request.nbytes, members, self._parts_of(request))
        for way in ways:
            self._out[way] = self._in[way] = end
        return [(rank, op, start, end, issued) for issued, rank, op in request.asked]

    def _parts_of(self, request: _Request) -> list[list[float]] | None:
        """Return the bytes from each member to each if any sends uneven parts; the others send equal ones."""
        uneven = {rank: self._parts.pop((rank, op), {}) for _, rank, op in request.asked}
        if not any(uneven.values()):
            return None
        members, n = request.route.members, len(request.route.members)
        rows = []
        for rank in members:
            even, own = request.payloads.get(rank, 0) / n, uneven.get(rank)
            rows.append([own.get(to, 0.0) if own else even for to in range(n)])
        return rows

    def _parse(self, text: str) -> _Route | None:
        ends, is_message, _ = text.partition("#")
        try:
            members = tuple(int(part) for part in ends.split(">" if is_message else ","))
        except ValueError:
            return None
        is_pair = len(members) == 2 and members[0] != members[1]
        if not all(0 <= rank < self._world_size for rank in members) or (is_message and not is_pair):
            return None
        link = self._hardware.link_of(members)
        return _Route(members, link, bool(is_message), link.transfer(_SEND, 1.0), self._ways(members))

    def _ways(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ways that these ranks occupy when they communicate."""
        nodes = {self._hardware.node_of(rank) for rank in members}
        network = len(nodes) > 1 and self._hardware.between is not None
        within = len(nodes) < len(members) or not network
        return (*members,) * within + tuple(self._world_size + rank for rank in members) * network
