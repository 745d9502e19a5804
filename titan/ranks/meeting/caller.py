"""Who calls node 0 while it waits for the other nodes: read as bytes come, and no launcher unless it says so."""

import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any

from titan.ranks.meeting.same_job import Statement

LONGEST = 1 << 24  # bytes of a message at most

_LENGTH = struct.Struct("!i")  # what `Connection` sends before a message
Message = dict[str, Any]


class UnknownCallerError(Exception):
    """A caller is no launcher."""


@dataclass
class Caller:
    """A connection that has not said yet who it is; read as bytes come, without waiting for any."""

    link: socket.socket
    address: str
    deadline: float
    bytes: bytearray = field(default_factory=bytearray)

    def read(self) -> Message | None:
        """What has come of the first message; None: not all. UnknownCallerError: of no launcher, or it has left."""
        try:
            chunk = self.link.recv(1 << 16)
        except BlockingIOError:
            return None
        except OSError as error:
            raise UnknownCallerError from error
        self.bytes += chunk
        if not chunk:
            raise UnknownCallerError
        if len(self.bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.bytes)
        if not 0 < length <= LONGEST or len(self.bytes) > _LENGTH.size + length:
            raise UnknownCallerError
        return _checked(bytes(self.bytes[_LENGTH.size :])) if len(self.bytes) == _LENGTH.size + length else None


def _checked(text: bytes) -> Message:
    try:
        hello: Message = json.loads(text)
        hello["statement"] = Statement.read(hello["statement"])
        numbers = [hello[name] for name in ("node", "nodes", "ranks")]
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownCallerError from error
    if not all(type(number) is int for number in numbers) or not 0 <= hello["node"] < hello["nodes"]:
        raise UnknownCallerError
    return hello
