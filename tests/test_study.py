"""The case study's one command: its faults are what it says, `compare` names them, and Lockstep's difference is exactly 0."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.soak
def test_the_study_tells_faults_from_lockstep(tmp_path):
    command = [sys.executable, str(ROOT / "studies/two_workers.py"), "--dataset=digits", "--steps=4", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "study.json").read_text())
    runs, said = found["variants"], found["compare"]
    assert runs["two"] == runs["one"]
    assert len({run["sha256"] for run in runs.values()}) == 4
    assert all(len(run["top_1"]) == len(run["top_5"]) == 4 for run in runs.values())
    assert "to the last bit" in said["two"]
    assert "gradients are summed over 2 workers, not averaged" in said["sum"]
    for variant in ("same", "both"):
        assert "all 2 workers read the same 64 examples" in said[variant]
    assert (tmp_path / "study.png").read_bytes()[:4] == b"\x89PNG"
