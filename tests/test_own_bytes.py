"""The measured bytes of every method, benchmarks/results/own_bytes.json: complete, explained, and those of today's code."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from own_bytes import DEFAULTS, FAT, LORA64, SIDE, measure  # noqa: E402

from scute_sgl.supported import SUPPORT  # noqa: E402

ROWS = {row["method"]: row for row in json.loads((BENCHMARKS / "results" / "own_bytes.json").read_text())["rows"]}
# Without a decomposition of the base weight
QUICK = "LORA DORA IA3 LN_TUNING TRAINABLE_TOKENS OFT DELORA MISS LOKR ROAD SHIRA SUPERTUNING WAVEFT HIRA GLORA".split()


def test_every_method_is_measured():
    assert list(ROWS) == list(DEFAULTS) and ROWS.keys() == {row.label for row in SUPPORT}
    assert not [method for method, row in ROWS.items() if row["refused"]]


@pytest.mark.parametrize("method", list(DEFAULTS))
def test_larger_than_the_file_only_with_a_reason(method):
    row = ROWS[method]
    assert row["bytes"] <= 1.1 * row["file"] + 256 or row["fat"] == FAT[method]


@pytest.fixture(scope="module")
def weight():
    import torch

    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.mark.parametrize("method", QUICK)
def test_the_code_of_today_occupies_what_was_measured(method, weight, tmp_path):
    found = measure(DEFAULTS[method], weight, tmp_path / method)
    assert found == {key: ROWS[method][key] for key in found}
    assert ROWS[method]["of_lora64"] == round(found["bytes"] / (2 * 2 * SIDE * LORA64.r), 4)
