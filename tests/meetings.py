"""For tests of how workers meet: several processes' parts in one cluster, as threads; and programs that are none of it."""

import contextlib
import socket
import threading
import time

import pytest

from cluster import greeting, meeting, preflight, rendezvous, spec

SOON_S = 8


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Short waits; for all tests of a module that has it in its names."""
    monkeypatch.setattr(meeting, "TELL_EVERY_S", 0.3)
    monkeypatch.setattr(meeting, "SURE_AFTER_S", 0.3)
    monkeypatch.setattr(rendezvous, "TELL_FOR_S", 0.8)
    monkeypatch.setattr(preflight, "_warned", set())
    for module in (meeting, rendezvous):
        monkeypatch.setattr(module, "REACH_S", 2)
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)


def members(addresses):
    """The workers of a cluster."""
    return [spec.parse(text) for text in spec.local_cluster(addresses)]


def together(*parts, timeout_s=20, **common):
    """What `preflight.check` does in each process (threads here): its word, or its lines. A part: (member, kwargs)."""
    results = [None] * len(parts)

    def one(place, member, delay=0, **own):
        time.sleep(delay)
        try:
            results[place] = preflight.check(member, **{"timeout_s": timeout_s, **common, **own})
        except spec.ClusterError as error:
            results[place] = str(error).splitlines()

    threads = [threading.Thread(target=one, args=(i, member), kwargs=own) for i, (member, own) in enumerate(parts)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - began < max(SOON_S, timeout_s if timeout_s < 20 else 0)
    return results


def each(cluster, **own):
    """A part for each of them."""
    return [(member, own) for member in cluster]


@contextlib.contextmanager
def program_at(address, says=b"", closes=False):
    """Another program that listens at an address."""
    host, port = greeting.host_and_port(address)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        kept = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    connection.sendall(says)
                    if closes:
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def facts(**groups):
    """What a process says about itself."""
    return preflight.Card(facts=groups)
