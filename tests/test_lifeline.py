"""Who is gone is named, and nobody waits: lifelines of several workers, in threads of one process, without TensorFlow."""

import queue
import threading
import time

import pytest

from cluster import lifeline, spec
from cluster.launcher import free_addresses

SOON_S = 4


class Cluster:
    """Lifelines of W workers; `ends` collects (worker, status) as they end."""

    def __init__(self, monkeypatch, workers, timeout_s=60, ps=0):
        monkeypatch.setattr(lifeline, "_doing", None)
        ports, self.ends = queue.Queue(), queue.Queue()

        def from_chief(me, value):
            if me.is_chief:
                for _ in range(me.workers):
                    ports.put(value)
            return ports.get(timeout=5)

        monkeypatch.setattr(lifeline.agreement, "from_chief", from_chief)
        members = [spec.parse(text) for text in spec.local_cluster(free_addresses(workers), ps)]
        self.addresses = members[0].addresses
        self.lines = [lifeline.Lifeline(me, timeout_s, self._end_of(me.number)) for me in members]
        starts = [threading.Thread(target=line.start) for line in self.lines]
        for start in starts:
            start.start()
        for start in starts:
            start.join(timeout=5)
        time.sleep(1.5)  # each has said who it is

    def _end_of(self, number):
        def end(status):
            self.ends.put((number, status))
            threading.Event().wait()  # it does not return

        return end

    def ended(self, count):
        return sorted(self.ends.get(timeout=SOON_S) for _ in range(count))

    def die(self, number):
        """What the kernel does when a process has ended."""
        self.lines[number]._leaving = True
        for connection in list(self.lines[number]._peers):
            connection.close()


@pytest.fixture
def cluster(monkeypatch):
    made = []

    def make(*args, **named):
        made.append(Cluster(monkeypatch, *args, **named))
        return made[-1]

    yield make
    for each in made:
        for line in each.lines:
            line._leaving = True


def test_a_worker_that_dies_is_named_by_all_others_with_what_to_do(cluster, monkeypatch, capfd):
    three = cluster(3)
    monkeypatch.setattr(lifeline, "remedy", "the same command goes on from runs/x/checkpoints/step-7.npz")
    three.die(1)
    assert three.ended(2) == [(0, 75), (2, 75)]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    says = f"error: worker 1 ({three.addresses[1]}) has ended without a word; "
    assert lines == [says + "the same command goes on from runs/x/checkpoints/step-7.npz"] * 2


def test_the_chiefs_end_is_seen_by_every_worker(cluster, capfd):
    three = cluster(3)
    three.die(0)
    assert three.ended(2) == [(1, 75), (2, 75)]
    assert capfd.readouterr().err.count(f"error: the chief ({three.addresses[0]}) has ended without a word") == 2


def test_a_failure_is_told_with_its_reason(cluster, capfd):
    three = cluster(3)
    three.lines[2].failed("ValueError: this worker is broken")
    assert three.ended(2) == [(0, 75), (1, 75)]
    assert capfd.readouterr().err.count("worker 2 has failed: ValueError: this worker is broken") == 2


def test_signs_of_life_are_a_message_a_second(cluster, monkeypatch):
    three = cluster(3)
    said = dict.fromkeys(three.lines, 0)
    for line in three.lines:
        monkeypatch.setattr(line, "_send", lambda _, line=line: said.__setitem__(line, said[line] + 1))
    before = time.process_time()
    time.sleep(3)
    assert all(2 <= count <= 4 for count in said.values())
    assert time.process_time() - before < 0.5


def test_nobody_misses_a_worker_that_has_left(cluster):
    two = cluster(2)
    two.lines[1].leave()
    time.sleep(0.5)
    two.die(1)
    time.sleep(1.5)
    assert two.ends.empty()


def test_a_coordinator_goes_on_without_a_worker_and_not_without_a_ps(cluster, capfd):
    four = cluster(4, ps=1)
    four.die(2)
    time.sleep(2)
    assert four.ends.empty()
    assert f"worker 1 ({four.addresses[2]}) has ended without a word: the others do its work" in capfd.readouterr().err
    four.die(3)
    assert four.ended(2) == [(0, 75), (1, 75)]
    assert f"error: ps 0 ({four.addresses[3]}) has ended without a word" in capfd.readouterr().err


def test_a_coordinator_goes_on_without_a_worker_that_hangs_and_tells_when_it_wakes(cluster, monkeypatch, capfd):
    monkeypatch.setattr(lifeline, "_HUNG_S", 1.5)
    three = cluster(3, ps=1, timeout_s=2.5)
    worker, signs = three.lines[1], three.lines[1]._send
    monkeypatch.setattr(worker, "_send", lambda said: None)
    time.sleep(4)
    assert three.ends.empty()
    monkeypatch.setattr(worker, "_send", signs)
    time.sleep(2)
    lines = capfd.readouterr().err.splitlines()
    says = f"worker 0 ({three.addresses[1]}) gives "
    assert lines == [says + "no sign of life for 2 s: the others do its work", says + "signs of life again"]


def test_without_any_worker_a_coordinator_gives_up_after_a_while(cluster, monkeypatch, capfd):
    monkeypatch.setattr(lifeline, "_ALONE_S", 1.5)
    three = cluster(3, ps=1)
    lifeline.sign("step 5")
    three.die(1)
    assert three.ended(2) == [(0, 75), (2, 75)]
    assert "all workers have ended, and none has come back" in capfd.readouterr().err


@pytest.mark.parametrize("status", [0, 75])
def test_servers_end_as_their_coordinator_does(cluster, status):
    three = cluster(3, ps=1)
    three.lines[0].leave(status)
    assert three.ended(2) == [(1, status), (2, status)]


def test_a_servers_wish_to_stop_is_the_coordinators(cluster, monkeypatch):
    monkeypatch.setattr(lifeline.wishes, "mine", [0, 0])  # all are one process here: what is sent is looked at
    three = cluster(3, ps=1)
    coordinator = three.lines[0]
    peer = next(iter(coordinator._peers.values()))
    coordinator._hear(peer, {"worker": 1, "wish": 1})
    assert lifeline.wishes.mine == [0, 0]  # nobody attends to it yet
    with lifeline.wishes.attended():
        coordinator._hear(peer, {"worker": 1, "wish": 1})
        assert lifeline.wishes.mine == [1, 0]


def test_a_worker_that_is_silent_is_named_after_the_timeout(cluster, monkeypatch, capfd):
    two = cluster(2, 2)
    monkeypatch.setattr(two.lines[1], "_send", lambda said: None)  # stopped: its connection stays open
    monkeypatch.setattr(two.lines[1], "_look_for_silence", lambda longest: None)
    assert two.ended(2) == [(0, 75), (1, 75)]  # if it goes on one day, it hears what was said
    assert f"worker 1 ({two.addresses[1]}) has given no sign of life" in capfd.readouterr().err


def test_a_step_that_does_not_end_leaves_the_stacks_of_all_threads(monkeypatch, tmp_path, capfd):
    ends = queue.Queue()
    monkeypatch.setattr(lifeline, "stacks", str(tmp_path / "log.txt"))
    line = lifeline.Lifeline(None, 1, lambda status: (ends.put(status), threading.Event().wait()))
    line.start()
    lifeline.sign("step 3")
    try:
        assert ends.get(timeout=SOON_S) == 75
    finally:
        line._leaving = True
        lifeline.sign(None)
    assert "this process has been in step 3 for" in capfd.readouterr().err
    assert "test_lifeline.py" in (tmp_path / "log.txt").read_text()


def test_what_takes_long_but_gives_signs_of_life_goes_on(monkeypatch):
    ends = queue.Queue()
    line = lifeline.Lifeline(None, 1.5, ends.put)
    line.start()
    for step in range(6):
        lifeline.sign(f"step {step}")
        time.sleep(0.5)
    lifeline.sign(None)
    line._leaving = True
    assert ends.empty()
