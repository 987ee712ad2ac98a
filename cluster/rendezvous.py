"""All workers meet before TensorFlow starts: every one reaches every other, or lines say who does not, and why.

TensorFlow's own start waits for a missing worker for ever, silently, deaf to signals: it holds Python's lock meanwhile, so no
thread of ours could speak up. Here each worker listens at the address that the cluster will use, and calls the chief. When
all are there, each calls all others; then the chief judges, tells everybody, and the addresses are free again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable

from cluster import greeting
from cluster.greeting import Unreachable
from cluster.meeting import AGAIN_S, REACH_S, TELL_FOR_S, Found, Guest, Meeting
from cluster.spec import Member


def meet(
    me: Member,
    timeout_s: float = 60,
    word: str = "",
    card: dict | None = None,
    stage: str = "",
    judge: Callable[[Found], tuple[list[str], list[str]]] = lambda found: ([], []),
) -> Found:
    """Returns when all workers of the cluster have met, with what the chief has to say; every worker calls it.

    Args:
      me: this process; its address is bound while it waits, and free afterwards.
      timeout_s: how long to wait for the others.
      word: on the chief, for all.
      card: what this process says about itself, in JSON values; sentences in card["problems"] prevent the start.
      stage: of several meetings of the same processes, so that nobody is taken for a guest of another one.
      judge: on the chief, says (problems, warnings) of the cards and trips that were found so far.
    Returns:
      Its `problems` say why the cluster cannot start, on every worker that could be told: the own address cannot be opened,
      somebody is missing in the end or is not who he should be, or what cards and `judge` say.
    """
    role = _Chief if me.is_chief else _Worker
    return asyncio.run(role(me, timeout_s, word, card or {}, stage, judge).run())


class _Chief(Meeting):
    """Hears everybody, lets all call all, judges, and tells."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.here: dict[int, Guest] = {}
        self.found.cards[0] = self.card

    async def play(self):
        for problem in self.card.get("problems", ()):
            self.problem(problem)
        for number in self.others:
            self.start(self._look_for(number))
        if await self._all_come():
            await self._all_call_all()
        self.waiting.clear()
        self._compare()
        self.verdict = self.found
        await self._announce()
        return self.verdict

    async def heard(self, message, guest):
        if "card" not in message:
            guest.answers.put_nowait(message)
        elif self.verdict:
            await self._inform(guest)
        elif guest.fits and guest.number in self.others:
            await self._welcome(guest, message["card"])

    async def _welcome(self, guest, card):
        """A worker has come, or has something new to say; it stays connected until it leaves."""
        before = self.here.get(guest.number)
        if before not in (None, guest) and await before.ask({"still": 1}, 2):
            self.problem(greeting.two_of(guest.number, self.me.addresses, before.process, guest.process))
        self.here[guest.number], self.found.cards[guest.number] = guest, card
        for problem in card.get("problems", ()):
            self.problem(problem)
        self._compare()
        await guest.say({"left": self.deadline - time.monotonic()})
        self.changed()

    def _compare(self):
        """With what was found so far: a worker that differs is told at once, whoever else is still to come."""
        problems, self.found.warnings = self.judge(self.found)
        for problem in problems:
            self.problem(problem)

    def gone(self, guest):
        if self.here.get(guest.number) is guest:
            del self.here[guest.number]
        self.changed()

    async def _inform(self, guest):
        await guest.say({"verdict": self.verdict.told()})
        self.informed.add(guest.number)
        self.changed()

    async def _look_for(self, number):
        """While a worker has not come, asks who is at its address; tells it there too that the cluster cannot start."""
        who = self.who(number)
        while number not in self.informed:
            if number in self.here:
                self.waiting.pop(who, None)
            else:
                why = "no answer yet"
                try:
                    _, _, writer, _, _ = await self.call(number)
                    why = "it is there, but does not reach the chief"
                    if self.verdict and self.verdict.problems and number not in self.informed:
                        await greeting.send(writer, {"refusal": self.verdict.problems})
                        self.informed.add(number)
                        self.changed()
                    writer.close()
                except (Unreachable, OSError) as error:
                    why = str(error)
                if number not in self.here and not self.verdict:
                    self.waiting[who] = why
            await asyncio.sleep(2 * AGAIN_S)

    async def _all_come(self):
        """Whether all workers have come, and nothing is wrong so far."""
        self.waiting |= {self.who(number): "" for number in self.others}
        while not self.found.problems:
            if len(self.here) == len(self.others):
                return True
            if not await self.change(self.deadline):
                for number in sorted(set(self.others) - set(self.here)):
                    self.found.missing[number] = why = self.waiting.get(self.who(number)) or "no answer"
                    text = f"{self.who(number)} did not start in time ({self.timeout_s:g} s): {why}"
                    self.problem(f"{text}; start all workers, each with the same list of workers")
        return False

    async def _all_call_all(self):
        guests = dict(sorted(self.here.items()))
        self.waiting = {self.who(number): "it calls all others" for number in guests}
        asked = [guest.ask({"reach": 1}, REACH_S) for guest in guests.values()]
        (failed, self.found.trips), *answers = await asyncio.gather(self.reach(self.others), *asked)
        for number, answer in zip([0, *guests], [{"reached": failed}, *answers], strict=True):
            if answer is None:
                self.problem(f"{self.who(number)} came, and left again or said nothing for {REACH_S} s; look at its output")
            for other, why in (answer or {}).get("reached", {}).items():
                self.problem(
                    f"{self.who(number)} cannot reach {self.who(int(other))}: {why}; open that port between all workers"
                )

    async def _announce(self):
        """Tells all; that there will be no start, also those who are still to come, for a while."""
        guests = list(self.here.values())
        await asyncio.gather(*map(self._inform, guests))
        until = time.monotonic() + (1 if self.verdict.problems else 5)
        while any(guest in self.here.values() for guest in guests) and await self.change(until):
            pass  # they leave when they have freed their addresses
        if self.verdict.problems and not self.verdict.missing:
            until = time.monotonic() + min(TELL_FOR_S, self.timeout_s)
            while not self.informed.issuperset(self.others) and await self.change(until):
                pass


class _Worker(Meeting):
    """Reaches the chief, does what it asks, and hears what it says."""

    async def play(self):
        chief = f"the chief at {self.me.addresses[0]}"
        for problem in self.card.get("problems", ()):
            self.problem(problem)
        until = None  # while this process cannot start, and tries to say so
        while not self.verdict:
            if self.found.problems and until is None:
                until = time.monotonic() + min(TELL_FOR_S, self.timeout_s)
            try:
                _, reader, writer, _, _ = await self._call_chief(
                    until or self.deadline, self.waiting.get(chief, "no answer yet")
                )
            except (Unreachable, OSError) as error:
                self.waiting[chief] = str(error)
            else:
                self.waiting.pop(chief, None)
                await self._stay(reader, writer)
                self.waiting[chief] = "it was there, and left or fell silent"
            stranger = self.found.problems and 0 in self.strangers  # nobody to tell
            if not self.verdict and (stranger or time.monotonic() > (until or self.deadline)):
                text = (
                    f"{self.me.name}: no answer from {chief} ({self.waiting[chief]}); start it, with the same list of workers"
                )
                return Found(problems=self.found.problems or [text])
            if not self.verdict:
                await self.change(time.monotonic() + AGAIN_S)
        return self.verdict

    async def _call_chief(self, until, otherwise):
        """`call`; given up then, or for a verdict or another problem: who is at that address may be silent for long."""
        calling = asyncio.ensure_future(self.call(0))
        calling.add_done_callback(self.changed)
        problems = len(self.found.problems)
        while not calling.done() and not self.verdict and len(self.found.problems) == problems:
            if not await self.change(until):
                break
        if not calling.done():
            calling.cancel()
            raise Unreachable(otherwise)
        return await calling

    async def _stay(self, reader, writer):
        """With the chief, until it leaves or has spoken."""
        obeying = asyncio.ensure_future(self._obey(reader, writer))
        obeying.add_done_callback(self.changed)
        told = None
        try:
            with contextlib.suppress(OSError):
                while not obeying.done() and not self.verdict and time.monotonic() < self.deadline:
                    if told != self.found.problems:
                        told = list(self.found.problems)
                        await greeting.send(writer, {"card": {**self.card, "problems": told}})
                    await self.change(self.deadline)
        finally:
            obeying.cancel()
            if self.verdict:
                self.leave()  # before the chief sees that this worker has gone
            writer.close()

    async def _obey(self, reader, writer):
        while message := await greeting.receive(reader):
            if "left" in message:  # the chief, which waits for others, decides how long
                self.deadline = max(self.deadline, time.monotonic() + float(message["left"]) + REACH_S + 10)
            elif "still" in message:
                await greeting.send(writer, {"still": 1})
            elif "reach" in message:
                failed, _ = await self.reach([number for number in self.others if number])
                await greeting.send(writer, {"reached": failed})
            elif "verdict" in message:
                self.verdict = Found(**message["verdict"])
                return

    async def heard(self, message, guest):
        if "refusal" in message and guest.number == 0:
            self.verdict = Found(problems=[str(text) for text in message["refusal"]])
            self.changed()
