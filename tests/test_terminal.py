"""What people see: a bar on a terminal, plain lines elsewhere, a table of epochs; and what must not be seen."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from app import terminal
from app.terminal import BAR, Progress, Terminal, duration

WIDTH = 60
# What a worker does: the chief narrates, with a bar, and a log beside; all others are silent.
WORKER = """
    import json, os, sys
    from app.terminal import Terminal, logged
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    screen = Terminal(silent=index > 0, quiet="quiet" in sys.argv)
    with logged(sys.argv[1] + str(index)):
        screen.say("begin")
        if screen.has_bar:
            screen.bar("[=...] a third " + 100 * "x")
            screen.bar("[==..] two thirds")
        screen.say("an epoch")
        if screen.has_bar:
            screen.bar("[===.] almost")
        if "fail" in sys.argv:
            import time
            time.sleep(0.5)
            sys.exit(3)
        screen.result("the end")
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER))
    return str(path)


def on_a_terminal(*command):
    """What is written to a terminal of WIDTH columns by a process: (exit status, all that was sent)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", BAR)}
    with subprocess.Popen([sys.executable, *command], env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        sent = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux, when the other end is closed
                data = b""
            if not data:
                break
            sent += data
        os.close(ours)
        return process.wait(timeout=30), sent.decode()


def screen(sent):
    """The lines that stand on the terminal in the end, and every state of the last one, by how terminals read CR and EL."""
    lines, column, states = [""], 0, []
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", sent):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
            column = 0
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + len(part) :]
            column += len(part)
            states.append(lines[-1])
    return lines, states


def test_on_a_terminal_a_bar_is_replaced_and_cut_and_leaves_nothing(program, tmp_path):
    for prefix, command in (("", []), ("[0] ", ["-m", "cluster.launcher", "--workers=2"])):
        log = str(tmp_path / f"log{len(command)}-")
        status, sent = on_a_terminal(*command, program, log)
        lines, states = screen(sent)
        assert status == 0
        assert lines == [f"{prefix}begin", f"{prefix}an epoch", f"{prefix}the end", ""]
        bars = [state for state in states if "[=" in state]
        assert len(bars) == 3 and all(bar.startswith(f"{prefix}[=") for bar in bars)
        assert "x" * 30 in bars[0] and "x" not in bars[1]
        assert max(map(len, states)) < WIDTH  # a longer one would wrap, and could not be replaced
        with open(f"{log}0") as file:
            assert file.read() == "begin\nan epoch\nthe end\n"
    with open(f"{log}1") as file:
        assert file.read() == ""


def test_on_a_terminal_a_failure_has_a_line_of_its_own(program, tmp_path):
    status, sent = on_a_terminal("-m", "cluster.launcher", "--workers=2", program, str(tmp_path / "log"), "fail")
    assert status == 3
    assert re.fullmatch(r"worker [01] failed with status 3; ending the others", screen(sent)[0][-2])


@pytest.mark.parametrize("quiet", [False, True])
def test_elsewhere_there_is_no_bar_and_quiet_prints_the_summary_alone(program, tmp_path, quiet):
    flags = ["quiet"] if quiet else []
    for prefix, command in (("", []), ("[0] ", ["-m", "cluster.launcher", "--workers=2"])):
        done = subprocess.run(
            [sys.executable, *command, program, str(tmp_path / "log"), *flags], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        expected = ["the end"] if quiet else ["begin", "an epoch", "the end"]
        assert done.stdout.splitlines() == [prefix + line for line in expected]


def test_quiet_has_no_bar_on_a_terminal_either(program, tmp_path):
    _, sent = on_a_terminal("-m", "cluster.launcher", "--workers=2", program, str(tmp_path / "log"), "quiet")
    assert screen(sent)[1] == ["[0] the end"]


def test_a_terminal_narrower_than_the_margin_shows_an_empty_bar(monkeypatch, capsys):
    monkeypatch.setenv(BAR, "1")
    Terminal().bar("[==] text")
    assert capsys.readouterr().out == "\r\n"


class Clock:
    """time.monotonic that is set by hand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)


def steps(progress, clock, last, seconds, per_epoch):
    for step in range(1, last + 1):
        clock.now += 16.9 if step == 1 else seconds
        progress.step({"step": step, "epoch": 1 + (step - 1) // per_epoch, "loss": 2 / step, "step_time_s": seconds})


def test_without_a_terminal_progress_is_a_line_every_half_minute(monkeypatch, capsys):
    """Steps of 4 s with 128 images each: 32 images/s; lines when 30 s have passed since the last."""
    monkeypatch.delenv(BAR, raising=False)
    clock = Clock(monkeypatch)
    steps(Progress(Terminal(), 11, 4, 44, 128), clock, 20, 4.0, 11)
    assert capsys.readouterr().out.splitlines() == [
        "first step after 16.9 s",
        "epoch 1/4  step 5/11  loss 0.4000  32 images/s  2 min 36 s left",  # 39 steps of 4 s
        "epoch 2/4  step 2/11  loss 0.1538  32 images/s  2 min 04 s left",
    ]


def test_on_a_terminal_progress_is_a_bar_five_times_a_second(monkeypatch, capsys):
    monkeypatch.setenv(BAR, "200")
    clock = Clock(monkeypatch)
    steps(Progress(Terminal(), 11, 4, 44, 128), clock, 11, 0.1, 11)
    assert capsys.readouterr().out.splitlines() == [
        "first step after 16.9 s",
        "",  # what follows a CR is a line to splitlines
        "[====................] epoch 1/4  step 2/11  loss 1.0000  1,280 images/s  4.2 s left",
        "",
        "[=======.............] epoch 1/4  step 4/11  loss 0.5000  1,280 images/s  4.0 s left",
        "",
        "[===========.........] epoch 1/4  step 6/11  loss 0.3333  1,280 images/s  3.8 s left",
        "",
        "[===============.....] epoch 1/4  step 8/11  loss 0.2500  1,280 images/s  3.6 s left",
        "",
        "[==================..] epoch 1/4  step 10/11  loss 0.2000  1,280 images/s  3.4 s left",
    ]


def test_the_table_of_epochs_is_aligned_and_has_top_5_and_held_out_columns_where_there_are_any(monkeypatch, capsys):
    monkeypatch.delenv(BAR, raising=False)
    one = {"epoch": 1, "step": 11, "loss": 2.02774, "top_1": 0.33878, "steps": 11, "seconds": 16.92, "images_per_sec": 83.2}
    held_out = {"top_5": 0.78, "val_loss": 12.25, "val_top_1": 0.14444, "val_top_5": 0.61389}
    full = Progress(Terminal(), 11, 40, 440, 128)
    full.epoch({**one, **held_out})
    full.epoch({**one, **held_out, "epoch": 40, "seconds": 3725.0, "images_per_sec": 12345.6})
    plain = Progress(Terminal(), 11, 1000, 11000, 128)
    plain.epoch(one)
    plain.epoch({**one, "epoch": 1000, "seconds": 59.97})
    assert capsys.readouterr().out.splitlines() == [
        "  epoch     loss    top-1    top-5  val loss  val top-1  val top-5  images/s     time",
        "   1/40   2.0277   0.3388   0.7800   12.2500     0.1444     0.6139        83   16.9 s",
        "  40/40   2.0277   0.3388   0.7800   12.2500     0.1444     0.6139    12,346  1 h 02 min",
        "    epoch     loss    top-1  images/s     time",
        "   1/1000   2.0277   0.3388        83   16.9 s",
        "1000/1000   2.0277   0.3388        83  1 min 00 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.04, "0.0 s"),
        (8.24, "8.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (60, "1 min 00 s"),
        (200.4, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_durations_are_written_as_a_person_would(seconds, text):
    assert duration(seconds) == text


def test_a_log_has_the_traceback_of_what_ended_the_run_and_may_lie_where_tensorflow_reaches(tensorflow, tmp_path):
    for number, place in enumerate((str(tmp_path), f"file://{tmp_path}")):
        path, output = f"{place}/log{number}", sys.stdout
        with pytest.raises(ValueError, match="broken"), terminal.logged(path):
            print("a line")
            raise ValueError("this is broken")
        assert sys.stdout is output
        text = (tmp_path / f"log{number}").read_text()
        assert text.startswith("a line\nTraceback") and text.endswith("ValueError: this is broken\n")
