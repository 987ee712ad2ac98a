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


def meet(me: Member, timeout_s: float = 300, word: str = "") -> str:
    """Returns when all workers of the cluster are there, with the chief's word to all.

    Args:
      me: this process; its address is bound while it waits.
      timeout_s: how long.
      word: on the chief, what it has to say.
    Raises:
      ClusterError: if the own address cannot be bound, or somebody is missing in the end; the message names the address.
    """
    deadline = time.monotonic() + timeout_s
    with _own_port(me, deadline) as listener:
        if me.is_chief:
            _gather(me, listener, deadline, word)
    return word if me.is_chief else _report(me, deadline)


def check_own_address(me: Member) -> None:
    """Raises ClusterError if this process cannot open its address."""
    _own_port(me, time.monotonic()).close()


def _own_port(me, deadline):
    """A listener at this process's address, which may be a name that does not resolve yet."""
    host, port = _host_and_port(me.addresses[me.number])
    while True:
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = _listener(family, kind, address, me.workers)
            if _is_local(address[0]) and not all(_is_local(_host_and_port(a)[0]) for a in me.addresses):
                # The own name means this machine alone here, as on Debian (127.0.1.1), but not to the others.
                listener.close()
                listener = _listener(family, kind, ("", port), me.workers)
            return listener
        except OSError as error:
            if not isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise ClusterError(
                    f"{me.name} cannot open its address {me.addresses[me.number]}: {error.strerror}. It must be an address of "
                    "this machine and a free port; another worker or an earlier run may still be there"
                ) from None
        time.sleep(1)


def _listener(family, kind, address, backlog):
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def _is_local(host):
    return host.startswith("127.") or host in ("::1", "localhost")


def _gather(me, listener, deadline, word):
    """The chief's part: hears everybody, then lets all go."""
    here: dict[int, socket.socket] = {}
    tell_at = time.monotonic() + _TELL_EVERY_S
    try:
        while missing := [n for n in range(1, me.workers) if n not in here or _gone(here[n])]:
            names = ", ".join(f"worker number {number} ({me.addresses[number]})" for number in missing)
            now = time.monotonic()
            if now > deadline:
                raise ClusterError(f"{names} did not start in time; start all workers, each with the same list of workers")
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
                    f"worker number {number} has another list of workers: {', '.join(addresses)}; "
                    f"the chief has {', '.join(me.addresses)}"
                )
            connection.setblocking(False)
            here[number] = connection
        for connection in here.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps({"word": word}).encode() + b"\n")
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
                return json.loads(connection.makefile().readline())["word"]
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not there yet; or gone, and then perhaps restarted
        now = time.monotonic()
        if now > deadline:
            raise ClusterError(f"{me.name}: no answer from the chief at {chief}; start it, with the same list of workers")
        if now > tell_at:
            print(f"{me.name}: waiting for the chief at {chief}", file=sys.stderr, flush=True)
            tell_at = now + _TELL_EVERY_S
        time.sleep(0.3)


def _host_and_port(address):
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
