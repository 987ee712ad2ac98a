"""A worker that comes, or comes back, to a run with parameter servers which has begun: nobody is there to meet.

It serves at its address, where TensorFlow's coordinator looks for it, and watches whether that still answers. It needs no
TensorFlow.
"""

import contextlib
import socket
import time

from cluster.spec import Member

_SETTINGS = b"\x04\0\0\0\0\0"  # bytes 3 to 9 of what a gRPC server says first (HTTP/2)
_EVERY_S = 1.0
_GONE_AFTER = 3  # calls in a row without an answer


def is_one(me: Member) -> bool:
    """Whether this is a worker, and TensorFlow answers at the coordinator's address."""
    return me.is_worker(me.number) and (_greeting(me.addresses[0]) or b"")[3:9] == _SETTINGS


def stay(me: Member) -> None:
    """Returns when the coordinator has ended."""
    silent = 0
    while silent < _GONE_AFTER:
        time.sleep(_EVERY_S)
        silent = silent + 1 if _greeting(me.addresses[0]) is None else 0


def _greeting(address, within_s=1.0):
    """What is said first at an address; None if nobody answers there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=within_s) as connection:
            with contextlib.suppress(TimeoutError):
                return connection.recv(64)
            return b""
    except OSError:
        return None
