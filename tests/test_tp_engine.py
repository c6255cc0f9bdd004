"""Two ranks of the real SGLang on the CPU: benchmarks/tp_checks.py, small."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "tp_checks.py"


def test_two_ranks_are_as_exact_as_one_and_refuse_together(tmp_path):
    flags = ["--tp", "2", "--tiny", "--device", "cpu", "--dtype", "float32", "--steps", "150", "--new-tokens", "48"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    exact = json.loads((tmp_path / "exactness_tp2.json").read_text())["rows"]
    assert {row["tp"] for row in exact} == {1, 2} and all(row["ok"] for row in exact)
    rows = json.loads((tmp_path / "tp_checks_tp2.json").read_text())["rows"]
    assert {row["check"] for row in rows} == {"difference", "storm", "answers", "refusal"}
    storm = next(row for row in rows if row["check"] == "storm")
    assert storm["rank_checks"] >= 150 and storm["swap_ins"] > 0 and storm["unloads"] > 0
