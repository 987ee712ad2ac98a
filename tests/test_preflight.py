"""Workers start together only if they have in common what they must; what differs is named on all of them, with both values."""

import re
import subprocess
import sys
import textwrap

import meetings
import numpy as np
import pytest
from meetings import each, facts, members, program_at, together

from cluster import greeting, preflight, spec
from cluster.launcher import free_addresses

impatient = meetings.impatient


@pytest.mark.parametrize(
    ("group", "theirs", "ours", "says"),
    [
        ("configuration", {"seed": 3}, {"seed": 1}, "another seed: 3; the chief has 1; start all workers with the same flags"),
        (
            "configuration",
            {"logical_replicas": 8, "intra_op_threads": 2},
            {"logical_replicas": 4, "intra_op_threads": 1},
            "another logical_replicas: 8; the chief has 4; another intra_op_threads: 2; the chief has 1; start all",
        ),
        (
            "versions",
            {"Keras": "3.14.0"},
            {"Keras": "3.15.1"},
            "another Keras: '3.14.0'; the chief has '3.15.1'; install the same",
        ),
        ("source", {"app/a.py": "ab"}, {"app/a.py": "cd"}, "another app/a.py: 'ab'; the chief has 'cd'; copy the same version"),
        ("source", {"app/b.py": "ab"}, {}, "another app/b.py: 'ab'; the chief has 'no such file'"),
        (
            "data",
            {"data manifest": "ab"},
            {"data manifest": "cd"},
            "another data manifest: 'ab'; the chief has 'cd'; prepare the",
        ),
        (
            "devices",
            {"number of GPUs": 2},
            {"number of GPUs": 1},
            "another number of GPUs: 2; the chief has 1; give all workers",
        ),
        (
            "machine",
            {"CPU features": ["avx2", "fma"]},
            {"CPU features": ["avx2", "avx512f"]},
            "another CPU features: it has fma, it lacks avx512f; use machines of one kind, or give up the same bits: ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else None,
)
def test_what_differs_is_told_to_all_with_worker_field_and_both_values(group, theirs, ours, says):
    cluster = members(free_addresses(3))
    cards = facts(**{group: ours}), facts(**{group: theirs}), facts(**{group: ours})
    for lines in together(*((member, {"card": card}) for member, card in zip(cluster, cards, strict=True))):
        assert len(lines) == 1
        assert lines[0].startswith(f"worker number 1 has {says}")


def test_who_differs_is_told_at_once_whoever_is_still_to_come():
    one, two, three = members(free_addresses(3))
    cards = ({"card": facts(configuration={"seed": seed})} for seed in (1, 3, 1))
    results = together((one, next(cards)), (two, next(cards)), (three, {**next(cards), "delay": 0.5}))
    assert len({str(lines) for lines in results}) == 1
    assert "another seed: 3; the chief has 1" in results[0][0]


def test_what_is_not_known_yet_or_is_no_matter_differs_from_nothing():
    cluster = members(free_addresses(2))
    one = facts(data={"data manifest": None}, source={"revision": "a"}, other={"x": [1, {"y": 2}]})
    two = facts(data={"data manifest": "ab"}, source={"revision": "b"}, other={"x": [1, {"y": 2}]})
    assert together((cluster[0], {"card": one, "word": "go"}), (cluster[1], {"card": two})) == ["go", "go"]


def test_other_processors_are_a_warning_where_the_same_bits_are_not_promised(capfd):
    cluster = members(free_addresses(2))
    cards = facts(machine={"CPU features": ["avx2"]}), facts(machine={"CPU features": ["avx2", "avx512f"]})
    parts = ((member, {"card": card}) for member, card in zip(cluster, cards, strict=True))
    assert together(*parts, word="go", identical=False) == ["go", "go"]
    assert (
        "warning: worker number 1 has another CPU features: it has avx512f; use machines of one kind" in capfd.readouterr().err
    )


def test_many_differences_stay_one_line():
    theirs, ours = ({str(i): sign for i in range(50)} for sign in "ab")
    ((group, line),) = preflight.differences({"source": theirs}, {"source": ours})
    assert (group, line.count("another"), line.endswith("and 46 more")) == ("source", 4, True)


def test_a_problem_of_one_worker_is_told_to_all():
    cluster = members(free_addresses(3))
    parts = (cluster[0], {}), (cluster[1], {}), (cluster[2], {"card": preflight.Card(problems=["the disk is full"])})
    assert together(*parts) == [[f"worker number 2 ({cluster[0].addresses[2]}): the disk is full"]] * 3


def test_clocks_that_differ_are_a_warning(monkeypatch, capfd):
    cluster = members(free_addresses(2))
    real = greeting.call

    async def call(*arguments):
        theirs, reader, writer, trip, ahead = await real(*arguments)
        return theirs, reader, writer, trip, ahead + 7.3

    monkeypatch.setattr(greeting, "call", call)
    assert together(*each(cluster), word="go") == ["go", "go"]
    assert re.search(r"warning: the clock of worker number 1 is 7\.\d s ahead of the chief's", capfd.readouterr().err)


def test_a_round_trip_measures_the_others_clock():
    one, two = members(free_addresses(2))
    found = []
    together((one, {"show": found.append}), (two, {}))
    trip, ahead = found[0].trips[1]
    assert 0 < trip < 2 and abs(ahead) <= trip


@pytest.mark.parametrize("proxy", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_is_passed_by_and_told_without_its_password(proxy):
    one = members(["10.0.0.1:2222", "[fd00::2]:2222", "10.0.0.1:2223"])[0]
    environ = {proxy: "http://me:secret@proxy:3128", "no_proxy": "intern"}
    said = preflight.bypass_proxies(one, environ)
    assert environ["no_grpc_proxy"] == "intern,10.0.0.1,fd00::2"
    assert environ["no_proxy"] == "intern"
    assert f"{proxy} is set, to proxy:3128: not used" in said and "secret" not in said
    assert preflight.bypass_proxies(one, {"HTTP_PROXY": "http://proxy"}) is None  # gRPC does not look there


def test_processor_features_are_those_that_choose_kernels(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse4_2 avx2 avx512f amx_bf16 fma smep\nbugs: x\n")
    assert preflight.machine(tmp_path / "cpuinfo", {})["CPU features"] == ["amx_bf16", "avx2", "avx512f", "fma", "sse4_2"]
    (tmp_path / "cpuinfo").write_text("Features\t: fp asimd asimddp sve bf16 i8mm cpuid\n")
    assert preflight.machine(tmp_path / "cpuinfo", {})["CPU features"] == ["asimd", "asimddp", "bf16", "i8mm", "sve"]
    assert preflight.machine(tmp_path / "none", {})["CPU features"] is None
    assert preflight.machine(environ={"XLA_FLAGS": "x"})["XLA_FLAGS"] == "x"


def test_versions_are_those_of_the_installed_packages():
    found = preflight.own_facts()["versions"]
    assert list(found) == ["Python", "TensorFlow", "Keras", "NumPy"]
    assert found["NumPy"] == np.__version__
    assert all(re.match(r"\d+\.\d+", version) for version in found.values())
    assert preflight.version("no-such-package") is None


# TensorFlow's start


def test_a_start_of_tensorflow_that_does_not_end_is_ended_with_a_line_that_names_who_is_missing():
    """C code that holds Python's lock, as TensorFlow's does while it waits."""
    addresses = free_addresses(2)
    code = f"""
        import ctypes, signal
        from cluster import spec, start_deadline
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        start_deadline._LEAST_S = 0.5
        me = spec.parse({spec.local_cluster(addresses)[0]!r})
        with start_deadline.watched(me, 5):
            pass
        with start_deadline.watched(None, 0.5), start_deadline.watched(me, 0.5):
            ctypes.PyDLL(None).sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with program_at(addresses[0]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"did not start within 0.5 s: nobody answers at {addresses[1]}" in done.stderr
