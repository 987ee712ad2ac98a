"""No worker waits for one that is gone: each learns within seconds who died or failed, in one line, and ends.

TensorFlow tells a lost worker late, in thirty lines that do not name it, and a stopped one (a hung disk, SIGSTOP, a cut cable)
never. So every worker holds a connection to the chief, which the kernel closes when a process dies, and says over it every
second what it does. A worker that gives no sign of life for `timeout_s`, whatever it does, ends all. The connection goes to
the chief's own address, at a port that the system chooses; what it carries is text that is only shown.

With parameter servers the chief coordinates: it goes on without a worker that ends or hangs, ends with a parameter server that
does, and tells all how to end; another process's wish to stop comes to it this way.
"""

import contextlib
import faulthandler
import json
import selectors
import socket
import sys
import threading
import time

from cluster import agreement, wishes

_EVERY_S = 1.0
_VERDICT_S = 5.0
_HUNG_S = 10.0  # after so long without a sign a coordinator says that it does without a worker (see remote_work.py)
_ALONE_S = 60.0  # so long a coordinator waits for a worker to come back when it has none
_doing, _since = None, time.monotonic()

stacks = None  # path of a file for the stacks of a worker that hangs; None: standard error
remedy = "start all workers again"  # the end of the line that tells of an end; the chief's goes to all


def sign(doing: str | None):
    """A sign of life: what this worker begins to do; None: nothing that has to end in time."""
    global _doing, _since
    _doing, _since = doing, time.monotonic()


class Lifeline:
    """Watches this process and, if there are others, them; ends the process when one is gone.

    Args:
      me: this process in its cluster, or None.
      timeout_s: the longest time without a sign of life.
      end: called as end(status) when it is over; does not return.
      place: where the chief listens, if that is known: on the chief a `listener`, elsewhere its port; None: it is told through
        TensorFlow's coordination service.
    """

    def __init__(self, me, timeout_s, end, place=None):
        self._me, self._timeout, self._end, self._place = me, timeout_s, end, place
        self._left = time.monotonic()  # since when no worker is here
        self._ending, self._leaving = threading.Event(), False
        self._peers = {}  # socket: what is known of the worker behind it
        self._lock = threading.Lock()

    def start(self):
        """Connects the workers; to be called when the strategy exists."""
        sign(None)
        loop = self._watch_alone
        if self._me and self._me.workers > 1:
            if self._me.is_chief:
                self._listener = self._place or listener(self._me)
                if not self._place:
                    agreement.from_chief(self._me, port_of(self._listener))
                loop = self._watch_all
            else:
                port = self._place or agreement.from_chief(self._me, None)
                connection = socket.create_connection((_host(self._me), port), timeout=30)
                self._add(connection, self._me.called(0), self._me.addresses[0])
                loop = self._watch_chief
        threading.Thread(target=loop, daemon=True, name="lifeline").start()

    def leave(self, status=0):
        """Before a good end: nobody is to miss this process. Those who work for it end with its status."""
        self._leaving = True
        self._send({"bye": True, "ended": status})

    def failed(self, why: str):
        """Before a bad end: tells the others why."""
        self._leaving = True
        self._send({"failed": why, "worker": self._me.number if self._me else 0})
        time.sleep(0.1 if self._peers else 0)

    # ---- the watch ---------------------------------------------------------------------------------------------------

    def _watch_alone(self):
        while not self._leaving:
            time.sleep(_EVERY_S)
            self._look_at_myself()

    def _watch_chief(self):
        with selectors.DefaultSelector() as selector:
            selector.register(next(iter(self._peers)), selectors.EVENT_READ)
            self._watch(selector, self._own_sign)

    def _watch_all(self):
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            self._watch(selector, lambda: {"remedy": remedy})

    def _own_sign(self):
        sign = {"worker": self._me.number, "doing": _doing, "age": time.monotonic() - _since}
        return {**sign, "wish": wishes.mine[wishes.STOP]} if self._me.ps else sign

    def _watch(self, selector, sign):
        """Hears the others at once, and says that it lives once a second, not at each word: nobody would be silent again."""
        due = time.monotonic()
        while not self._leaving:
            for key, _ in selector.select(max(0, due - time.monotonic())):
                if key.fileobj in self._peers:
                    self._read(key.fileobj, selector)
                else:
                    connection, _ = key.fileobj.accept()
                    self._add(connection, None, None)
                    selector.register(connection, selectors.EVENT_READ)
            if time.monotonic() >= due:
                due = time.monotonic() + _EVERY_S
                self._send(sign())
                self._look_for_silence(self._timeout)
                self._look_for_workers()
                self._look_at_myself()

    def _add(self, connection, name, address):
        connection.settimeout(5)
        self._peers[connection] = {"name": name, "address": address, "heard": time.monotonic(), "text": b"", "bye": False}

    def _read(self, connection, selector):
        peer = self._peers[connection]
        try:
            received = connection.recv(65536)
        except OSError:
            received = b""
        if not received:
            selector.unregister(connection)
            del self._peers[connection]
            if peer["name"] and not peer["bye"]:
                self._lost(peer)
            return
        peer["heard"], peer["text"] = time.monotonic(), peer["text"] + received
        *lines, peer["text"] = peer["text"].split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # a stranger's line
                if isinstance(said := json.loads(line), dict):
                    self._hear(peer, said)

    def _lost(self, peer):
        what = f"{peer['name']} ({peer['address']}) has ended without a word"
        if not self._does_without(peer):
            self._over(what)
        elif not self._leaving:
            print(f"{what}: the others do its work, and it may come back", file=sys.stderr, flush=True)

    def _hear(self, peer, said):
        if isinstance(number := said.get("worker"), int) and 0 <= number < self._me.workers:
            peer |= {"number": number, "name": self._me.called(number), "address": self._me.addresses[number]}
        peer |= {key: said[key] for key in ("doing", "age", "bye") if key in said}
        if said.get("wish") and wishes.attend():
            wishes.mine[wishes.STOP] = 1
        if "ended" in said and self._me.number and self._me.ps:
            self._leaving = True
            self._end(said["ended"])
        if "failed" in said and self._does_without(peer):
            print(f"{peer['name']} has failed: {said['failed']}", file=sys.stderr, flush=True)
        elif "failed" in said:
            peer["bye"] = True
            time.sleep(1)  # this one may be about to end for the same reason, and to say it better
            self._over(f"{peer['name']} has failed: {said['failed']}")
        if "remedy" in said:
            global remedy
            remedy = said["remedy"]
        if "over" in said:
            self._over(said["over"], pass_on=False)

    def _send(self, said):
        line = json.dumps(said).encode() + b"\n"
        with self._lock:
            for connection in list(self._peers):
                with contextlib.suppress(OSError):
                    connection.sendall(line)

    def _look_for_silence(self, longest):
        for peer in list(self._peers.values()):
            silent = time.monotonic() - peer["heard"]
            name = f"{peer['name']} ({peer['address']})"
            if not peer["name"] or peer["bye"]:
                continue
            if not self._does_without(peer):
                if silent > longest:
                    self._over(f"{name} has given no sign of life for {silent:.0f} s, {_shown(peer)}")
            elif peer.get("hung", False) != (silent > _HUNG_S):
                peer["hung"] = silent > _HUNG_S
                says = f"no sign of life for {silent:.0f} s: the others do its work" if peer["hung"] else "signs of life again"
                print(f"{name} gives {says}", file=sys.stderr, flush=True)

    def _does_without(self, peer):
        """A coordinator does without a worker."""
        return self._me.is_chief and self._me.is_worker(peer.get("number", 0))

    def _look_for_workers(self):
        """A coordinator without workers ends after a while, unless one that has come back brings it on."""
        if not (self._me.ps and self._me.is_chief) or any(
            self._me.is_worker(peer.get("number", 0)) for peer in self._peers.values()
        ):
            self._left = time.monotonic()
        elif _doing and time.monotonic() - max(self._left, _since) > _ALONE_S:
            self._over(f"all workers have ended, and none has come back within {_ALONE_S:.0f} s")

    def _look_at_myself(self):
        age = time.monotonic() - _since
        if _doing is None or age < self._timeout:
            return
        file = open(stacks, "a") if stacks else sys.stderr  # noqa: SIM115
        faulthandler.dump_traceback(file, all_threads=True)
        others = [f"{p['name']}: {_shown(p)}" for p in self._peers.values() if p.get("number")]
        also = f" ({'; '.join(others)})" if others else ""
        where = f"; the stacks of its threads are in {stacks}" if stacks else ""
        name = "this process" if self._me is None else self._me.called(self._me.number)
        self._over(f"{name} has been in {_doing} for {age:.0f} s{also}{where}")

    def _over(self, why, pass_on=True):
        """Tells, and ends this process: 75, for the same command goes on. Does not return."""
        if self._leaving:
            return
        self._ending.set()
        if pass_on:
            why = f"{why}; {remedy}"
            self._send({"over": why})
        print(f"error: {why}", file=sys.stderr, flush=True)
        time.sleep(0.5 if pass_on else 0)  # the others are to hear it before they see a connection close
        self._end(wishes.RESUMABLE)

    def explains(self):
        """Waits a little for another worker's end as the reason of an error here. If it is, the process ends in here.

        TensorFlow's own heartbeats miss a stopped worker after some ten seconds, and its collectives fail then.
        """
        if self._me is None or self._me.workers == 1:
            return
        if not self._ending.wait(_VERDICT_S if self._me.is_chief else 2 * _VERDICT_S):  # the chief's goes to the others
            self._look_for_silence(_VERDICT_S)
        elif not self._leaving:
            time.sleep(60)


def listener(me):
    """A socket for the chief to listen at for all others: at its own address, at a port that the system chooses."""
    return socket.create_server((_host(me), 0), family=_family(_host(me)))


def port_of(listening) -> int:
    return listening.getsockname()[1]


def _host(me):
    return me.addresses[0].rpartition(":")[0].strip("[]")


def _shown(peer):
    return f"last seen in {peer['doing']} for {peer['age']:.0f} s" if peer.get("doing") else "last seen outside a step"


def _family(host):
    return socket.AF_INET6 if ":" in host else socket.AF_INET
