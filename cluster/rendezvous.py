"""All workers meet before TensorFlow starts, or one line says who is missing.

TensorFlow's own start waits for a missing worker for ever, silently, deaf to signals: it holds Python's lock meanwhile, so no
thread of ours could speak up. Here every worker reports to the chief over TCP, on the addresses that the cluster will
use, which are free again when TensorFlow opens its servers there.
"""

import contextlib
import json
import socket
import sys
import time

from cluster.spec import ClusterError, Member

_TELL_EVERY_S = 5


def meet(me: Member, timeout_s: float = 300) -> None:
    """Returns when all workers of the cluster are there.

    Args:
      me: this process; its address is bound while it waits.
      timeout_s: how long.
    Raises:
      ClusterError: if the own address cannot be bound, or somebody is missing in the end; the message names the address.
    """
    deadline = time.monotonic() + timeout_s
    with _own_port(me) as listener:
        if me.is_chief:
            _gather(me, listener, deadline)
    if not me.is_chief:
        _report(me, deadline)


def _own_port(me):
    host, port = _host_and_port(me.addresses[me.number])
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(me.workers)
    except OSError as error:
        raise ClusterError(
            f"{me.name} cannot open its address {me.addresses[me.number]}: {error.strerror}. It must be an address of this "
            "machine and a free port; another worker or an earlier run may still be there"
        ) from None
    return listener


def _gather(me, listener, deadline):
    """The chief's part: hears everybody, then lets all go."""
    here: dict[int, socket.socket] = {}
    tell_at = time.monotonic() + _TELL_EVERY_S
    try:
        while missing := [n for n in range(1, me.workers) if n not in here or _gone(here[n])]:
            names = ", ".join(f"worker number {number} ({me.addresses[number]})" for number in missing)
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(f"{names} did not start in time; start all workers, each with the same cluster in TF_CONFIG")
            if now > tell_at:
                print(f"waiting for {names}", file=sys.stderr, flush=True)
                tell_at = now + _TELL_EVERY_S
            listener.settimeout(0.5)
            try:
                connection, _ = listener.accept()
                connection.settimeout(5)
                hello = json.loads(connection.makefile().readline(4096))
                number, addresses = hello["number"], tuple(hello["addresses"])
            except (OSError, ValueError, TypeError, KeyError):
                continue  # nobody came, or it was no worker
            if addresses != me.addresses:
                raise ClusterError(
                    f"worker number {number} has another cluster in TF_CONFIG: {', '.join(addresses)}; "
                    f"the chief has {', '.join(me.addresses)}"
                )
            connection.setblocking(False)
            here[number] = connection
        for connection in here.values():
            with contextlib.suppress(OSError):
                connection.sendall(b"go\n")
    finally:
        for connection in here.values():
            connection.close()


def _gone(connection):
    """Whether the worker at the other end has left while it was waiting."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(me, deadline):
    """A worker's part: reaches the chief, and waits until all have."""
    chief = me.addresses[0]
    tell_at = time.monotonic() + _TELL_EVERY_S
    while True:
        try:
            with socket.create_connection(_host_and_port(chief), timeout=2) as connection:
                hello = {"number": me.number, "addresses": me.addresses}
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(max(1, deadline - time.monotonic()))
                if connection.makefile().readline() == "go\n":
                    return
        except OSError:
            pass  # not there yet; or gone, and then perhaps restarted
        now = time.monotonic()
        if now > deadline:
            raise ClusterError(f"{me.name}: no answer from the chief at {chief}; start it, with the same cluster in TF_CONFIG")
        if now > tell_at:
            print(f"{me.name}: waiting for the chief at {chief}", file=sys.stderr, flush=True)
            tell_at = now + _TELL_EVERY_S
        time.sleep(0.3)


def _host_and_port(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
