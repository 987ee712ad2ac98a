"""All meet, or what keeps them from it is named in time, on every worker: who is late, missing, or somebody else."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import meetings
import pytest
from meetings import each, members, program_at, together

from cluster import greeting, meeting, preflight, spec
from cluster.launcher import free_addresses

impatient = meetings.impatient


# All is well


def test_all_meet_hear_the_chiefs_word_and_their_addresses_are_free_again():
    cluster = members(free_addresses(4))
    assert together(*each(cluster), word="go") == ["go"] * 4
    for address in cluster[0].addresses:
        with socket.socket() as probe:
            probe.bind(greeting.host_and_port(address))


@pytest.mark.parametrize("host", ["[::1]", "localhost", socket.gethostname()])
def test_addresses_may_be_names_or_ipv6(host):
    if host == "[::1]" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    ports = [address.rpartition(":")[2] for address in free_addresses(2)]
    assert together(*each(members([f"{host}:{port}" for port in ports])), word="go") == ["go", "go"]


def test_the_chiefs_word_alone_counts():
    one, two = members(free_addresses(2))
    assert together((one, {"word": "stay"}), (two, {"word": "go"})) == ["stay", "stay"]


def test_who_is_late_is_waited_for_and_named_meanwhile(capfd):
    one, two, three = members(free_addresses(3))
    assert together((one, {"word": "go"}), (two, {}), (three, {"delay": 1.5})) == ["go"] * 3
    said = capfd.readouterr().err
    assert f"waiting for worker number 2 ({three.addresses[2]}): nobody listens there yet\n" in said


def test_a_late_chief_is_named_by_those_who_wait_for_it(capfd):
    one, two = members(free_addresses(2))
    assert together((one, {"delay": 1.2, "word": "go"}), (two, {})) == ["go", "go"]
    assert f"worker 1: waiting for the chief at {one.addresses[0]}: nobody listens there yet" in capfd.readouterr().err


def test_who_waits_for_a_late_chief_then_waits_as_long_as_the_chief_does():
    one, two, three = members(free_addresses(3))
    parts = (one, {"delay": 0.7, "word": "go"}), (two, {"timeout_s": 1}), (three, {"delay": 2})
    assert together(*parts) == ["go"] * 3


def test_nonsense_from_anybody_does_not_disturb():
    cluster = members(free_addresses(2))
    host, port = greeting.host_and_port(cluster[0].addresses[0])
    hello = greeting.hello(cluster[1])
    nonsense = [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04\x95pickle\n", b"[" * 100_000 + b"\n", b"x" * (3 << 20), b"\n", b""]

    def disturb():
        hellos = [{**hello, "number": "1"}, {**hello, "addresses": [1]}, {**hello, "process": "\x1b[2J"}, {"lockstep": 1}]
        for said in (*nonsense, *(json.dumps(said).encode() + b"\n" for said in hellos)):
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2) as connection:
                connection.sendall(said)

    threading.Timer(0.3, disturb).start()
    assert together((cluster[0], {"word": "go"}), (cluster[1], {"delay": 1})) == ["go", "go"]


def test_a_worker_that_left_and_came_again_is_one_worker():
    one, two, three = members(free_addresses(3))
    with pytest.raises(spec.ClusterError):
        preflight.check(two, timeout_s=0.2)  # before the chief
    assert together((one, {"word": "go"}), (two, {}), (three, {"delay": 0.5})) == ["go"] * 3


def test_who_is_at_another_stage_of_its_start_is_waited_for():
    one, two = members(free_addresses(2))
    results = []

    def early():
        results.extend(together((one, {"word": "early", "stage": "imports"}), (two, {"stage": "imports", "delay": 0.7})))

    thread = threading.Thread(target=early)
    thread.start()
    time.sleep(0.2)
    with pytest.raises(spec.ClusterError, match=r"it is at another stage of its start"):
        preflight.check(two, timeout_s=0.1)
    thread.join()
    assert results == ["early", "early"]


# Somebody is missing


def test_who_does_not_come_is_named_to_all_with_what_is_known_of_the_address():
    cluster = members(free_addresses(3))
    lines = together(*each(cluster[:2]), timeout_s=1)
    assert lines[0] == lines[1]
    assert lines[0] == [
        f"worker number 2 ({cluster[2].addresses[2]}) did not start in time (1 s): nobody listens there yet; "
        "start all workers, each with the same list of workers"
    ]


def test_without_a_chief_a_worker_gives_up_in_time():
    one, two = members(free_addresses(2))
    (lines,) = together((two, {}), timeout_s=1)
    assert lines == [
        f"worker 1: no answer from the chief at {one.addresses[0]} (nobody listens there yet); "
        "start it, with the same list of workers"
    ]


def test_a_worker_that_stops_while_all_call_all_is_named(monkeypatch):
    addresses = free_addresses(2)
    code = f"""
        import os, signal
        from cluster import greeting, meeting, preflight, spec
        async def stop(*_):
            os.kill(os.getpid(), signal.SIGSTOP)
        meeting.Meeting.reach = stop
        preflight.check(spec.parse({spec.local_cluster(addresses)[1]!r}))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as process:
        try:
            lines = together((members(addresses)[0], {}))[0]
        finally:
            process.kill()
    assert re.match(rf"worker number 1 \({addresses[1]}\) (came, and left again or said nothing for 2 s)", lines[0])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_ends_the_waiting_at_once(number, status, index):
    code = f"""
        import sys
        from cluster import meeting, preflight, spec
        meeting.TELL_EVERY_S = 0.2
        try:
            preflight.check(spec.parse({spec.local_cluster(free_addresses(2))[index]!r}))
        except KeyboardInterrupt:
            sys.exit(130)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert "waiting for" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(timeout=2) == status


# Lists, indices, jobs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a, b, c, d: [a, b, d], "entry 2 is {d} there and {c} here"),
        (lambda a, b, c, d: [a, b, c, d], "it has 4 entries, and here are 3; only there: {d}"),
        (lambda a, b, c, d: [a, b], "it has 2 entries, and here are 3; only here: {c}"),
        (lambda a, b, c, d: [c, b, a], "entries 0 and 2, {a} and {c}, are swapped"),
        (lambda a, b, c, d: [d, b, c], "entry 0 is {d} there and {a} here"),
        (lambda a, b, c, d: [b, c, a], "entry 0 is {b} there and {a} here; entry 1 is {c} there and {b} here; entry 2"),
    ],
    ids=["another entry", "longer", "shorter", "swapped", "another chief", "rotated"],
)
def test_another_list_of_workers_is_told_entry_by_entry_and_all_end(change, says):
    a, b, c, d = free_addresses(4)
    theirs = change(a, b, c, d)
    one, _, three = members([a, b, c])
    odd = members(theirs)[1]  # at b, or, of rotated lists, at c
    others = [one, three] if theirs[1] == b else [one]
    results = together((odd, {}), *each(others), timeout_s=10)
    told = "\n".join(results[1])
    assert "has another list of workers" in told
    assert says.format(a=a, b=b, c=c, d=d) in told
    assert all(isinstance(lines, list) and "another list of workers" in lines[0] for lines in results)


def test_two_that_take_each_other_for_the_second_are_both_told():
    a, b = free_addresses(2)
    lines = together((members([a, b])[0], {}), (members([b, a])[0], {}))
    assert all("are swapped" in line and "another list of workers" in line for (line,) in lines)


@pytest.mark.parametrize("index", [0, 1])
def test_two_processes_with_one_index_are_both_told_and_so_are_the_others(index):
    cluster = members(free_addresses(3))
    results = together((cluster[index], {}), (cluster[index], {"delay": 0.5}), (cluster[1 - index], {}), timeout_s=10)
    for lines in results:
        assert any(f"there are two of worker number {index} ({cluster[0].addresses[index]})" in line for line in lines)
        assert any("give each process its own task index" in line for line in lines)


def test_two_addresses_that_are_one_place_are_told():
    port = free_addresses(1)[0].rpartition(":")[2]
    cluster = members([f"127.0.0.1:{port}", f"localhost:{port}"])
    lines = together(*each(cluster), timeout_s=10)
    assert any("two of the addresses are one place" in line for each in lines for line in each)


def test_a_process_of_another_job_or_version_is_no_worker_of_this_one():
    one, two = members(free_addresses(2))
    mine = greeting.hello(one, {"LOCKSTEP_JOB": "7"})
    assert greeting.conflict(mine, greeting.hello(two, {"LOCKSTEP_JOB": "7"}), 1) is None
    assert "is of another job: job 8 there, and job 7 here" in greeting.conflict(
        mine, greeting.hello(two, {"LOCKSTEP_JOB": "8"})
    )
    assert "another job: no job there" in greeting.conflict(mine, greeting.hello(two, {}), 1)
    assert "another version of Lockstep" in greeting.conflict(mine, {**greeting.hello(two), "lockstep": 2}, 1)
    slurm = spec.parse(two.tf_config, "Slurm")
    assert greeting.hello(slurm, {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"})["job"] == "Slurm's 4711.0"


# Addresses and ports


@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_own_port_that_another_program_has_is_told_to_all(index):
    cluster = members(free_addresses(3))
    with program_at(cluster[0].addresses[index], b"SSH-2.0-OpenSSH_9.6\r\n"):
        for lines in together(*each(cluster), timeout_s=10):
            assert any(
                f"worker {index} cannot open its address {cluster[0].addresses[index]}: Address already in use: "
                "another program is there, which says 'SSH-2.0-OpenSSH_9.6'" in line
                for line in lines
            ) or (index == 0 and "another program is there" in lines[0])


@pytest.mark.parametrize("index", [0, 1])
def test_an_own_port_that_a_silent_program_has_is_told_to_both_in_one_line_within_seconds(capsys, index):
    cluster, began = members(free_addresses(2)), time.monotonic()
    with program_at(cluster[0].addresses[index]):
        for lines in together(*each(cluster)):
            assert len(lines) == 1
            assert f"worker {index} cannot open its address {cluster[0].addresses[index]}: Address already in use: " in lines[0]
    assert time.monotonic() - began < 4
    assert "not starting" not in capsys.readouterr().err


def test_an_own_address_of_another_machine_is_told_to_all():
    ours = free_addresses(2)
    cluster = members([ours[0], "192.0.2.1:2222", ours[1]])  # an address for documentation, RFC 5737
    for lines in together(*each(cluster), timeout_s=10):
        assert "worker 1 cannot open its address 192.0.2.1:2222: Cannot assign requested address" in lines[0]
        assert "each process needs the task index whose address is its machine's" in lines[0]


@pytest.mark.parametrize(
    ("says", "what"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program is there, which says 'SSH-2.0-OpenSSH_9.6'"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program is there, which says 'HTTP/1.1 400 Bad Request'"),
        (b'{"lockstep": "no"}\n', "another program is there"),
        (b"\0\0\x12\x04\0\0\0\0\0" + b"\0" * 18, "a gRPC server is there, as TensorFlow's in a run that has started"),
    ],
    ids=["ssh", "http", "json", "grpc"],
)
@pytest.mark.parametrize("index", [0, 1])
def test_another_program_at_an_address_is_told_long_before_the_deadline(says, what, index):
    cluster = members(free_addresses(2))
    with program_at(cluster[0].addresses[index], says):
        (lines,) = together((cluster[1 - index], {}))
    assert lines[0].startswith(f"at the address of worker number {index} ({cluster[0].addresses[index]}): {what}")


@pytest.mark.parametrize(
    ("closes", "what"), [(False, "it takes the connection and says nothing"), (True, "it closes the connection without a word")]
)
def test_what_takes_the_connection_and_is_silent_is_told_at_the_deadline(monkeypatch, closes, what):
    monkeypatch.setattr(greeting, "ANSWER_S", 0.3)
    cluster = members(free_addresses(2))
    with program_at(cluster[0].addresses[1], closes=closes):
        (lines,) = together((cluster[0], {}), timeout_s=1.5)
    assert f"did not start in time (1.5 s): {what}" in lines[0]


def test_another_program_that_goes_away_in_time_does_no_harm(monkeypatch):
    monkeypatch.setattr(meeting, "SURE_AFTER_S", 5)
    one, two = members(free_addresses(2))
    outcome = []
    thread = threading.Thread(target=lambda: outcome.extend(together((one, {"word": "go"}))))
    with program_at(two.addresses[1], b"220 mail\r\n"):
        thread.start()
        time.sleep(0.7)
    assert together((two, {})) == ["go"]
    thread.join()
    assert outcome == ["go"]


def test_names_that_do_not_resolve_yet_are_tried_again_and_named(monkeypatch, capfd):
    ports = [address.rpartition(":")[2] for address in free_addresses(2)]
    cluster = members([f"early.invalid:{ports[0]}", f"late.invalid:{ports[1]}"])
    real, began = socket.getaddrinfo, time.monotonic()

    def resolve(host, *arguments, **more):
        if host.endswith(".invalid") and time.monotonic() - began < 1.5 * (host == "late.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if host.endswith(".invalid") else host, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert together((cluster[0], {"word": "go"}), (cluster[1], {})) == ["go", "go"]
    said = capfd.readouterr().err
    assert "waiting for worker number 1 (late.invalid:" in said
    assert ": the name does not resolve yet (Name or service not known)" in said
    assert "worker 1: waiting for its own address late.invalid:" in said


def test_a_name_that_never_resolves_is_told_at_the_deadline(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-2, "not known")))
    (lines,) = together((members(["nowhere.invalid:2222", "elsewhere.invalid:2222"])[0], {}), timeout_s=0.5)
    assert "worker 0 cannot open its own address nowhere.invalid:2222: the name does not resolve yet (not known)" in lines[0]


def test_workers_that_reach_the_chief_but_not_each_other_are_told(monkeypatch):
    cluster = members(free_addresses(3))
    real = greeting.call

    async def call(address, number, mine):
        if (mine["number"], number) == (2, 1):
            raise greeting.Unreachable("no answer: the machine is off, or a firewall is between")
        return await real(address, number, mine)

    monkeypatch.setattr(greeting, "call", call)
    a = cluster[0].addresses
    for lines in together(*each(cluster)):
        assert lines == [
            f"worker number 2 ({a[2]}) cannot reach worker number 1 ({a[1]}): no answer: the machine is off, or a firewall is "
            "between; open that port between all workers"
        ]


def test_a_cluster_of_one_looks_at_its_own_address():
    (alone,) = members(free_addresses(1))
    assert together((alone, {"word": "go"})) == ["go"]
    with program_at(alone.addresses[0], b"SSH-2.0\r\n"):
        assert "worker 0 cannot open its address" in together((alone, {}))[0][0]
