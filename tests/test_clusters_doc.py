"""docs/clusters.md can be copied: its scripts start what they say, and its examples are what the program makes of them."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from conftest import ROOT, processes_left

from cluster import spec

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "clusters.md").read_text(), re.M | re.S)
MANIFEST = next(code for language, code in BLOCKS if language == "yaml")
POD = textwrap.dedent(re.search(r"^ +- \|\n(.*?)^ +volumeMounts:", MANIFEST, re.M | re.S)[1])
SSH = next(code for _, code in BLOCKS if "cluster.sh" in code)
SCRIPTS = [code for language, code in BLOCKS if language == "bash"] + [POD]
HOSTS = "user@one two"
FOLDER = """it's "here" $HOME"""
ARGUMENT = "--run_dir=two words, $HOME, it's \\ `id`\n& more"

# Stands in for ssh: the command runs in a session of its own, and only its input tells it that the connection has ended.
FAKE_SSH = f"""#!{sys.executable}
import os, shutil, subprocess, sys, threading
host, command = sys.argv[-2:]
environment = {{**os.environ, "HOST": host}}
there = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, start_new_session=True, env=environment)
def forward():
    while data := os.read(0, 65536):
        there.stdin.write(data)
    there.stdin.close()
threading.Thread(target=forward, daemon=True).start()
os._exit(there.wait() & 255)
"""
FAKE_RUN = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$HOST.arguments"
until [[ -f user@one.arguments && -f two.arguments ]]; do sleep 0.05; done
sleep "$(cat "$HOST.seconds")"
exit "$(cat "$HOST.status")"
"""


@pytest.fixture
def other_end(tmp_path):
    """A folder with the script, an ssh and a run.sh that notes its arguments and ends as it is told."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    for path, text in ((tmp_path / "bin" / "ssh", FAKE_SSH), (folder / "run.sh", FAKE_RUN), (tmp_path / "cluster.sh", SSH)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return folder


def start(folder, one, two, **environment):
    """cluster.sh, whose workers sleep so many seconds and end with such a status."""
    for host, (seconds, status) in (("user@one", one), ("two", two)):
        (folder / f"{host}.seconds").write_text(str(seconds))
        (folder / f"{host}.status").write_text(str(status))
    path = f"{folder.parent / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOSTS": HOSTS, "FOLDER": str(folder), **environment}
    with open(folder.parent / "stderr", "w") as stderr:
        return subprocess.Popen([folder.parent / "cluster.sh", "train", ARGUMENT], env=environment, cwd=folder, stderr=stderr)


def all_gone(within):
    deadline = time.monotonic() + within
    while processes_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_left()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.splitlines()[0][:40])
def test_bash_can_read_every_script(script):
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def test_the_page_has_them_all():
    assert (len(SCRIPTS), "srun" in SCRIPTS[2], "getent" in POD) == (5, True, True)


def test_slurms_variables_on_the_page_give_the_tf_config_on_the_page():
    variables = next(code for language, code in BLOCKS if language == "text")
    environ = dict(line.split("=", 1) for line in variables.splitlines())
    shown = next(code for language, code in BLOCKS if language == "json")
    assert json.loads(spec.from_environment(environ).tf_config) == json.loads(shown)


def test_the_first_two_scripts_say_the_same_in_two_ways():
    text = re.search("TF_CONFIG='(.*)'", SCRIPTS[0])[1]
    hosts, index = re.search(r"--worker_hosts=(\S+) --task_index=(\d+)", SCRIPTS[1]).groups()
    assert spec.from_environment({"TF_CONFIG": text}) == spec.from_environment({}, hosts, index)


def test_a_pod_starts_its_worker(tmp_path):
    (tmp_path / "run.sh").write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "getent").write_text('#!/usr/bin/env bash\n[[ $2 == lockstep-1.lockstep ]] && touch "$0.asked"\n')
    for name in ("run.sh", "getent"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORKERS": "3", "JOB_COMPLETION_INDEX": "1"}
    done = subprocess.run(["bash", "-c", POD], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    flags = dict(flag.split("=", 1) for flag in done.stdout.splitlines() if "=" in flag)
    member = spec.from_environment({}, flags["--worker_hosts"], flags["--task_index"])
    assert member.addresses == ("lockstep-0.lockstep:2222", "lockstep-1.lockstep:2222", "lockstep-2.lockstep:2222")
    assert (member.name, (tmp_path / "getent.asked").exists()) == ("worker 1", True)


def test_over_ssh_every_host_gets_its_index_and_the_arguments_unchanged(other_end):
    assert start(other_end, (0, 0), (0.2, 0)).wait(timeout=20) == 0
    for index, host in enumerate(("user@one", "two")):
        arguments = (other_end / f"{host}.arguments").read_text().split("\0")[:-1]
        assert arguments == ["train", ARGUMENT, "--worker_hosts=one:2222,two:2222", f"--task_index={index}"]
    assert (other_end.parent / "stderr").read_text() == ""
    assert all_gone(within=5)


def test_over_ssh_one_failure_ends_all(other_end):
    assert start(other_end, (60, 0), (0, 3)).wait(timeout=20) == 3
    assert (other_end.parent / "stderr").read_text() == "a worker ended with status 3; ending all\n"
    assert all_gone(within=5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_over_ssh_all_end_with_the_script(other_end, number):
    script = start(other_end, (60, 0), (60, 0))
    while not all((other_end / f"{host}.arguments").exists() for host in ("user@one", "two")):
        time.sleep(0.05)
    script.send_signal(number)
    assert script.wait(timeout=20) == 143
    assert all_gone(within=5)


def test_over_ssh_the_project_can_be_copied(other_end, tmp_path):
    target = tmp_path / "copied to" / FOLDER
    script = start(other_end, (0, 0), (0, 0), COPY="yes", FOLDER=str(target))
    assert script.wait(timeout=20) == 0
    assert (target / "two.arguments").exists() and not (other_end / "two.arguments").exists()
