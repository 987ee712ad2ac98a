"""Two processes find out whether each is the one that the other takes it for: a line of JSON each way, over TCP.

The line is short, its length and its time are limited, and nothing in it is executed. It proves nothing to an enemy: the
connections of a cluster have no authentication, those of TensorFlow neither.
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import os
import secrets
import socket
import threading
import time

from cluster.spec import Member

PROTOCOL = 1
LIMIT = 1 << 20  # bytes of a line
BACKLOG = 256  # callers that are not answered yet
CONNECT_S, ANSWER_S = 3, 5
_NOBODY = "nobody listens there yet"
_KINDS = {"lockstep": int, "number": int, "addresses": list, "time": float}
_KINDS |= dict.fromkeys(("job", "process", "nonce", "stage"), str)


class Unreachable(Exception):
    """Nobody of ours is at an address now; that may change."""


class Stranger(Exception):
    """Somebody else is at an address. `nonce`: of a process of this program, with which waiting does not help; else ""."""

    def __init__(self, text, nonce=""):
        super().__init__(text)
        self.nonce = nonce


def hello(me: Member, environ=None, stage: str = "") -> dict:
    """What a process says first: who it is, in which cluster, in which job, and at which of several meetings."""
    environ = os.environ if environ is None else environ
    job = environ.get("LOCKSTEP_JOB", "")
    if not job and me.origin == "Slurm":
        job = f"Slurm's {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    process = f"process {os.getpid()} on {socket.gethostname()}"
    said = {"lockstep": PROTOCOL, "number": me.number, "addresses": list(me.addresses), "job": job}
    return {**said, "process": process, "nonce": secrets.token_hex(8), "stage": stage, "time": time.time()}


def conflict(mine: dict, theirs: dict, called: int | None = None) -> str | None:
    """What is wrong if two processes mean to be in one cluster, in a sentence with what to do; None if nothing is.

    Args:
      mine, theirs: their hellos.
      called: the number whose address was called, if it was us who called.
    """
    who = f"{theirs['process']}, worker number {theirs['number']} by its own account,"
    if called is not None and theirs["number"] == called:
        who = f"{name(called, mine['addresses'])}, {theirs['process']},"
    if theirs["lockstep"] != PROTOCOL:
        return f"{who} has another version of Lockstep: copy the same version to all machines"
    if theirs["job"] != mine["job"]:
        there, here = (f"job {job}" if job else "no job" for job in (theirs["job"], mine["job"]))
        return f"{who} is of another job: {there} there, and {here} here; end the other one, or use other ports"
    if theirs["addresses"] != mine["addresses"]:
        difference = _difference(theirs["addresses"], mine["addresses"])
        return f"{who} has another list of workers: {difference}; give all workers the same list, in the same order"
    if called is not None and theirs["number"] != called:
        return (
            f"at the address of {name(called, mine['addresses'])} answers worker number {theirs['number']}, "
            f"{theirs['process']}: two of the addresses are one place; give each worker its own host:port"
        )
    if theirs["number"] == mine["number"] and theirs["nonce"] != mine["nonce"]:
        return two_of(mine["number"], mine["addresses"], mine["process"], theirs["process"])
    return None


def two_of(number: int, addresses, one: str, other: str) -> str:
    return f"there are two of {name(number, addresses)}: {one} and {other}; give each process its own task index"


def _difference(theirs, ours):
    """How another list of addresses differs, with the entries that do (the first few)."""
    if len(theirs) != len(ours):
        both = f"it has {len(theirs)} entries, and here are {len(ours)}"
        where, longer, shorter = ("there", theirs, ours) if len(theirs) > len(ours) else ("here", ours, theirs)
        extra = [str(address) for address in longer if address not in shorter]
        return f"{both}; only {where}: {', '.join(extra[:4])}{' ...' if len(extra) > 4 else ''}" if extra else both
    places = [i for i, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other]
    if len(places) == 2 and theirs[places[0]] == ours[places[1]] and theirs[places[1]] == ours[places[0]]:
        return f"entries {places[0]} and {places[1]}, {ours[places[0]]} and {ours[places[1]]}, are swapped"
    shown = "; ".join(f"entry {i} is {theirs[i]} there and {ours[i]} here" for i in places[:4])
    return f"{shown} ..." if len(places) > 4 else shown


def name(number: int, addresses) -> str:
    """How lines call a worker."""
    return f"worker number {number} ({addresses[number]})" if 0 <= number < len(addresses) else f"worker number {number}"


def called(me: Member, number: int) -> str:
    """How lines call one of this process's cluster; with parameter servers by its role."""
    return f"{me.called(number)} ({me.addresses[number]})" if me.ps else name(number, me.addresses)


async def call(address: str, number: int, mine: dict):
    """Calls the worker that is to be at an address.

    Returns:
      (its hello, reader, writer, round trip in seconds, how far its clock is ahead in seconds).
    Raises:
      Unreachable, Stranger: in words that go after the address.
    """
    reader, writer = await _connect(address)
    try:
        if writer.get_extra_info("sockname") == writer.get_extra_info("peername"):  # a port's own echo, among ephemeral ones
            raise Unreachable(_NOBODY)
        began, asked = time.monotonic(), time.time()
        await send(writer, mine)
        theirs = await _first_line(reader)
        trip = time.monotonic() - began
        if problem := conflict(mine, theirs, number):
            raise Stranger(problem, theirs["nonce"])
        if theirs["stage"] != mine["stage"]:
            raise Unreachable("it is at another stage of its start, or was started anew")
    except OSError as error:
        writer.transport.abort()
        raise Unreachable(error.strerror or "it does not read what it is told") from None
    except BaseException:
        writer.transport.abort()
        raise
    return theirs, reader, writer, trip, theirs["time"] - (asked + trip / 2)


async def _connect(address):
    host, port = host_and_port(address)
    found = Unreachable("no address")
    for family, kind, protocol, _, place in await resolve(host, port):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(connection, place)
            return await asyncio.open_connection(sock=connection, limit=LIMIT)
        except TimeoutError:
            connection.close()
            found = Unreachable("no answer: the machine is off, or a firewall is between")
        except ConnectionRefusedError:
            connection.close()
            found = Unreachable(_NOBODY)
        except OSError as error:
            connection.close()
            found = Unreachable(error.strerror or str(error))
        except BaseException:
            connection.close()
            raise
    raise found


async def _first_line(reader):
    """A hello. What answers in another way is no process of ours."""
    try:
        async with asyncio.timeout(ANSWER_S):
            said = await reader.read(LIMIT)
            while (
                said.startswith(b"{") and not said.endswith(b"\n") and len(said) < LIMIT and (more := await reader.read(LIMIT))
            ):
                said += more
    except TimeoutError:
        raise Unreachable("it takes the connection and says nothing: a stopped process, or another program") from None
    except OSError:
        said = b""
    if not said:
        raise Unreachable("it closes the connection without a word: another program, or a worker that is ending")
    if said[3:9] == b"\x04\0\0\0\0\0":  # HTTP/2 SETTINGS, with which a gRPC server greets
        raise Stranger("a gRPC server is there, as TensorFlow's in a run that has started: end that run, or use another port")
    if (theirs := parsed(said)) is None:
        raise Stranger(f"another program is there, which says {_shown(said)}: end it, or use another port")
    return theirs


def parsed(line: bytes) -> dict | None:
    """A hello in a line; None if it is none."""
    try:
        said = json.loads(line)
        fits = all(type(said[key]) is kind for key, kind in _KINDS.items())
        texts = [said["process"], said["job"], *said["addresses"]]  # which are printed
        return said if fits and all(len(text) <= 300 and text.isprintable() for text in texts) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _shown(said):
    text = said[:60].decode("ascii", "replace").split("\n")[0].strip()
    return repr("".join(c if c.isprintable() else "?" for c in text))


async def send(writer, message: dict) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
    async with asyncio.timeout(ANSWER_S):
        await writer.drain()


async def line(reader, within: float | None = None) -> bytes:
    """A line; empty if the other has gone, says too much without an end, or is silent for so many seconds."""
    try:
        async with asyncio.timeout(within):
            return await reader.readline()
    except (OSError, ValueError):  # TimeoutError is an OSError
        return b""


async def receive(reader) -> dict | None:
    """The next message; None if the other has gone or says nonsense."""
    try:
        said = json.loads(await line(reader))
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


async def resolve(host: str, port: int) -> list:
    """socket.getaddrinfo, in a thread that nobody has to wait for. Raises Unreachable."""
    loop, flags = asyncio.get_running_loop(), 0
    answer = loop.create_future()

    def look():
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
        except (OSError, UnicodeError) as error:
            found = Unreachable(f"the name does not resolve yet ({getattr(error, 'strerror', None) or error})")
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))

    try:
        ipaddress.ip_address(host.partition("%")[0])
        flags = socket.AI_NUMERICHOST
        look()
    except ValueError:
        threading.Thread(target=look, daemon=True, name=f"resolve {host}").start()
    found = await answer
    if isinstance(found, Unreachable):
        raise found
    return found


def listener(me: Member, infos: list) -> socket.socket:
    """A listener at this process's own address, resolved. Raises OSError."""
    family, kind, _, _, place = infos[0]
    made = _listener(family, kind, place)
    if _is_local(place[0]) and not all(_is_local(host_and_port(a)[0]) for a in me.addresses):
        # The own name means this machine alone here, as on Debian (127.0.1.1), but not to the others.
        made.close()
        made = _listener(family, kind, ("", place[1]))
    return made


def why_not(me: Member, error: OSError, holder: str = "") -> str:
    """Why this process cannot open its address, and what to do.

    Args:
      holder: who is there, if that is known.
    """
    advice = {
        errno.EADDRINUSE: holder
        or "another worker or an earlier run may still be there; give each process its own address and task index",
        errno.EADDRNOTAVAIL: f"it is no address of this machine, {socket.gethostname()}; each process needs the task index "
        "whose address is its machine's",
        errno.EACCES: "ports below 1024 are the system's; use one above",
    }.get(error.errno, "it must be an address of this machine and a free port")
    return f"{me.name} cannot open its address {me.addresses[me.number]}: {error.strerror}: {advice}"


def _listener(family, kind, address):
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def _is_local(host):
    return host.startswith("127.") or host in ("::1", "localhost")


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
