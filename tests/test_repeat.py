"""`repeat`: the spread over seeds, of runs that are made once."""

import json
import re

import numpy as np
import pytest

from app import command_line, compare_command, config, repeat, repeat_picture

FLAGS = ["--dataset=synthetic:8x8x1:10:256", "--model=lenet", "--global_batch_size=32", "--shards=4"]


def test_repeat_tells_the_spread_and_makes_no_run_twice(tmp_path, capsys):
    """Of runs that have finished before, which it only reads."""
    from app.__main__ import main

    flags = [*FLAGS, f"--repeat_dir={tmp_path}", "--seeds=3", "--seed=4"]
    settings, _ = command_line.parse([*FLAGS])
    values = [0.5, 0.75, 0.625]
    for seed, value in zip((4, 5, 6), values, strict=True):
        directory = tmp_path / f"seed-{seed}"
        directory.mkdir()
        recorded = {
            **{f: getattr(settings, f) for f in config.Config.__dataclass_fields__},
            "seed": seed,
            "data_manifest": None,
        }
        (directory / "config.json").write_text(json.dumps(recorded))
        summary = {"steps": 3, "sha256": "aa", "val_top_1": value, "loss": 2 * value, "seconds": 3.0}
        (directory / "summary.json").write_text(json.dumps(summary))
        epochs = [{"event": "epoch", "epoch": e, "val_top_1": value, "loss": 1.0} for e in (1, 2)]
        (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, epochs)))
    assert main(["repeat", *flags]) == 0
    output = capsys.readouterr().out
    assert "seed 6 (3 of 3): finished before" in output
    assert re.search(r"val_top_1 +0\.6250 +0\.1250 +0\.0722 +0\.5000 +0\.7500", output)
    spreads = repeat.spread(str(tmp_path))
    assert spreads["val_top_1"] == pytest.approx(np.std(values, ddof=1))
    assert repeat.in_spreads("val_top_1", 0.5, 1.0, spreads) == (
        "val_top_1 0.5000 against 1.0000: 4.0 times the spread over seeds, 0.1250; more than seeds do"
    )
    assert "seeds alone do as much" in repeat.in_spreads("val_top_1", 0.5, 0.75, spreads)
    pair = [str(tmp_path / f"seed-{seed}") for seed in (4, 5)]
    assert [line[:40] for line in compare_command._in_spreads(pair, spreads)] == [
        "val_top_1 0.5000 against 0.7500: 2.0 tim",
        "loss 1.0000 against 1.5000: 2.0 times th",
    ]
    assert (tmp_path / "repeat.png").read_bytes()[:4] == b"\x89PNG"
    repeat_picture.draw(json.loads((tmp_path / "repeat.json").read_text()), str(tmp_path / "again.png"))
