"""What chief and workers have in common while they meet: an own address, callers, calls, and lines that name who is awaited."""

import abc
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable

from cluster import greeting
from cluster.greeting import Stranger, Unreachable
from cluster.spec import Member

TELL_EVERY_S = 5
AGAIN_S = 0.3  # between two calls
SURE_AFTER_S = 2  # another program that is still there so much later is no run that was just ending
TELL_FOR_S = 2  # who cannot start stays so long to tell the workers that are still to come
HOLDER_S = 1  # for who has the own address to say what it is
REACH_S = 15  # for all to call all others, when all are there


@dataclasses.dataclass
class Found:
    """What the chief found. The others are told the first three.

    Attributes:
      word: the chief's, to all.
      problems: sentences; none if the cluster can start.
      warnings: sentences.
      cards: {number: what that worker said about itself}, of those that came.
      trips: {number: (round trip in seconds, how far its clock is ahead of the chief's in seconds)}.
      missing: {number: why nobody answers there}.
    """

    word: str = ""
    problems: list[str] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    cards: dict[int, dict] = dataclasses.field(default_factory=dict)
    trips: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    missing: dict[int, str] = dataclasses.field(default_factory=dict)

    def told(self) -> dict:
        """The part that goes to the others."""
        return {"word": self.word, "problems": self.problems, "warnings": self.warnings}


class Guest:
    """A caller that has said who it is; `fits` if that is somebody of this cluster."""

    def __init__(self, said, fits, writer):
        self.number, self.process, self.fits = said["number"], said["process"], fits
        self._writer, self.answers = writer, asyncio.Queue()

    async def say(self, message) -> None:
        with contextlib.suppress(OSError):
            await greeting.send(self._writer, message)

    async def ask(self, question, within) -> dict | None:
        """Its answer; None if it leaves or is silent for so many seconds."""
        while not self.answers.empty():
            self.answers.get_nowait()
        await self.say(question)
        try:
            async with asyncio.timeout(within):
                return await self.answers.get()
        except TimeoutError:
            return None


class Meeting(abc.ABC):
    """A process's part; see `rendezvous.meet`. Roles override `play` and `heard`."""

    def __init__(self, me: Member, timeout_s: float, word: str, card: dict, stage: str, judge: Callable):
        self.me, self.card, self.judge = me, card, judge
        self.hello = greeting.hello(me, stage=stage)
        self.found = Found(word)
        self.verdict: Found | None = None
        self.others = [number for number in range(me.workers) if number != me.number]
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.waiting: dict[str, str] = {}  # for whom or what, and what is known about it
        self.strangers: dict[int, float] = {}  # since when somebody else has been at a worker's address
        self.informed: set[int] = set()  # who knows that there will be no start, or who is told by the chief
        self._news, self._server, self._writers, self._tasks, self._known = asyncio.Event(), None, set(), set(), set()

    async def run(self) -> Found:
        self.start(self._tell())
        try:
            await self._open()
            return await self.play()
        finally:
            self.leave()
            for task in self._tasks:
                task.cancel()
            await asyncio.sleep(0)

    @abc.abstractmethod
    async def play(self) -> Found:
        """What this side does until all have met, or cannot."""

    @abc.abstractmethod
    async def heard(self, message: dict, guest: Guest) -> None:
        """A caller has said something."""

    def gone(self, guest: Guest) -> None:  # noqa: B027 (a side need not care)
        """A caller has left."""

    def who(self, number) -> str:
        return greeting.called(self.me, number)

    def start(self, work) -> None:
        """Does something beside, until the meeting is over."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """Frees the own address."""
        if self._server:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def problem(self, text: str) -> None:
        if text not in self.found.problems:
            self.found.problems.append(text)
        self.changed()

    def conflict(self, text: str, nonce: str, number: int) -> None:
        """A problem with another process of this program, in the place of worker `number`, which sees it as well."""
        if nonce not in self._known:
            self._known.add(nonce)
            self.problem(text)
        self.informed.add(number)

    def changed(self, *_) -> None:
        self._news.set()

    async def change(self, until: float) -> bool:
        """Waits until something has changed; False if nothing has until then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._news.wait()
                self._news.clear()
                return True
        return False

    async def _tell(self):
        prefix = "" if self.me.is_chief else f"{self.me.name}: "
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            if self.waiting:
                whom = [f"{who}: {why}" if why else who for who, why in list(self.waiting.items())[:8]]
                more = f"; and {len(self.waiting) - 8} more" if len(self.waiting) > 8 else ""
                print(f"{prefix}waiting for {'; '.join(whom)}{more}", file=sys.stderr, flush=True)

    async def _open(self):
        """Listens at the own address, which may be a name that does not resolve yet; a problem if that cannot be."""
        mine = self.me.addresses[self.me.number]
        host, port = greeting.host_and_port(mine)
        awaited = f"its own address {mine}"
        while not self._server:
            try:
                made = greeting.listener(self.me, await greeting.resolve(host, port))
                self._server = await asyncio.start_server(
                    self._serve, sock=made, limit=greeting.LIMIT, backlog=greeting.BACKLOG
                )
            except Unreachable as error:
                self.waiting[awaited] = str(error)
                if time.monotonic() > self.deadline:
                    return self.problem(
                        f"{self.me.name} cannot open {awaited}: {error}; use a name that means this machine here"
                    )
                await asyncio.sleep(AGAIN_S)
            except OSError as error:
                return self.problem(greeting.why_not(self.me, error, await self._holder()))
        self.waiting.pop(awaited, None)
        return None

    async def _holder(self):
        """Who listens at the own address, if it says so at once."""
        try:
            async with asyncio.timeout(HOLDER_S):
                await greeting.call(self.me.addresses[self.me.number], self.me.number, self.hello)
        except Stranger as error:
            return str(error)
        except (Unreachable, TimeoutError):
            pass
        return ""

    async def _serve(self, reader, writer):
        if len(self._writers) > 4 * self.me.workers + 64:
            return writer.transport.abort()
        self._writers.add(writer)
        guest = None
        try:
            said = greeting.parsed(await greeting.line(reader, greeting.ANSWER_S))
            if said:
                await greeting.send(writer, {**self.hello, "time": time.time()})
                problem = greeting.conflict(self.hello, said)
                if problem:
                    self.conflict(problem, said["nonce"], self._place(said))
                if said["stage"] == self.hello["stage"]:
                    guest = Guest(said, not problem, writer)
                    while message := await greeting.receive(reader):
                        await self.heard(message, guest)
        except OSError:
            pass
        finally:
            if guest:
                guest.answers.put_nowait(None)
                self.gone(guest)
            self._writers.discard(writer)
            writer.transport.abort()

    def _place(self, said):
        """The number, here, of the worker whose address a caller has by its own account; or that which it says."""
        own = said["addresses"][said["number"] : said["number"] + 1]
        return next((number for number in self.others if [self.me.addresses[number]] == own), said["number"])

    async def call(self, number: int):
        """`greeting.call` for a worker; a problem too, if somebody else is there for good. Raises Unreachable."""
        try:
            answer = await greeting.call(self.me.addresses[number], number, self.hello)
        except Stranger as error:
            since = self.strangers.setdefault(number, time.monotonic())
            if error.nonce:
                self.conflict(str(error), error.nonce, number)
            elif time.monotonic() - since > SURE_AFTER_S:
                self.problem(f"at the address of {self.who(number)}: {error}")
            raise Unreachable(str(error)) from None
        self.strangers.pop(number, None)
        return answer

    async def reach(self, numbers) -> tuple[dict[int, str], dict[int, tuple[float, float]]]:
        """Calls workers that are there. Returns ({number: why not}, {number: (round trip, how far its clock is ahead)})."""
        failed, trips = dict.fromkeys(numbers, "no answer"), {}

        async def once(number):
            while True:
                try:
                    _, _, writer, *trip = await self.call(number)
                    writer.close()
                    trips[number] = tuple(trip)
                    del failed[number]
                    return
                except Unreachable as error:
                    failed[number] = str(error)
                await asyncio.sleep(AGAIN_S)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.7 * REACH_S):
                await asyncio.gather(*map(once, numbers))
        return failed, trips
