"""``scute plan``: the byte model's arithmetic on adapters that PEFT wrote, and its messages."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_adapters import SIZES, make_base
from servers import Kit

from scute_sgl import byte_model, cli, config, plan_cli
from scute_sgl.byte_model import GPUS, Cost, Gpu, bytes_of_step
from scute_sgl.inspection import look, row

ROOT = Path(__file__).parents[1]
FIELDS = ["name", "method", "bytes_step", "ms_step", "bytes_step_lora64", "ms_step_lora64", "resident", "swap_in_ms"]
HALF = torch.float16
HIDDEN, KEY_VALUE, MLP, LAYERS, VOCABULARY = 64, 32, 96, SIZES["num_hidden_layers"], SIZES["vocab_size"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


def folder_of(root: Path, name: str) -> Path:
    return Path(Kit(root).adapter(name, "llama"))


def cost_of(root: Path, name: str) -> Cost:
    found = look(folder_of(root, name), config.read_base(make_base("llama", root), HALF), HALF)
    return byte_model.cost(found.modules, found.packed)


def scute(root, capsys, names, *flags) -> list[dict]:
    folders = [str(folder_of(root, name)) for name in names]
    assert cli.main(["plan", "--model", make_base("llama", root), "--adapters", *folders, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


OTHER = ["--bandwidth", "1000", "--launch", "2", "--memory", "40"]


def test_rows_follow_the_bandwidth_and_the_launches(root, capsys):
    """Launches of a fused layer: one to expand, for all methods; to rotate another one, and one more in every other
    layer, which has several projections."""
    rows = scute(root, capsys, ["lora", "vera", "oft"], *OTHER)
    assert all([*row] == FIELDS for row in rows) and [row["name"] for row in rows] == ["lora", "vera", "oft", "total"]
    layers = 4 * LAYERS
    for line, launches in zip(rows, (1, 1, 2.5, 2.5)):
        assert line["ms_step"] == pytest.approx(line["bytes_step"] / 1e9 + launches * layers * 2e-3)
        assert line["ms_step_lora64"] == pytest.approx(line["bytes_step_lora64"] / 1e9 + layers * 2e-3)
    assert rows[-1]["bytes_step"] == sum(line["bytes_step"] for line in rows[:-1])
    assert rows[-1]["method"] is None and rows[-1]["resident"] == 3


@pytest.mark.parametrize(
    ("flags", "launches"),
    [
        (["--batch", "24"], (1, 3, 2, 6, 6)),
        (["--batch", "25"], (1, 3, 2, 6, 4.5)),  # the total alone has more than 24
        (["--batch", "104"], (1, 1, 2.5, 4.5, 4.5)),
        (["--dtype", "float32"], (1, 1, 2.5, 4.5, 4.5)),
    ],
)
def test_few_rows_have_their_sums_before_a_gemm_that_expands(root, capsys, flags, launches):
    """One launch sums of private factors, two of shared ones, one rotates, two are for structures."""
    rows, gpu = scute(root, capsys, ["lora", "vera", "oft", "lokr_both"], "--gpu", "H100", *flags), GPUS["H100"]
    for line, each in zip(rows, launches, strict=True):
        added = byte_model.added_ms(line["bytes_step"], each * 4 * LAYERS, gpu)
        assert line["ms_step"] == pytest.approx(added), line["name"]


def test_bytes_are_those_of_the_tensors(root):
    linears = 4 * HIDDEN + 2 * (HIDDEN + KEY_VALUE) + 3 * (HIDDEN + MLP)  # in + out of q and o, k and v, the MLP
    assert cost_of(root, "lora") == Cost(2 * 8 * linears * LAYERS, live=1)
    vectors = 3 * HIDDEN + 2 * KEY_VALUE + 2 * MLP
    assert cost_of(root, "dora").own == 2 * (8 * linears + vectors) * LAYERS  # rank 4 takes the room of 8
    # VeRA on q and v: one read of A for both, B's rows for each; d (8) and e are its own, an image has whole blocks
    vera = cost_of(root, "vera")
    assert vera.shared == 2 * 8 * (HIDDEN + HIDDEN + KEY_VALUE) * LAYERS
    assert vera.own == -(-2 * (8 + HIDDEN + 8 + KEY_VALUE) * LAYERS // 256) * 256


def test_what_is_made_of_the_weight_reads_it_once_more_for_all(root, capsys):
    weights = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_VALUE + 3 * HIDDEN * MLP) * LAYERS
    hira, bat = cost_of(root, "hira"), cost_of(root, "miss_bat")
    assert hira.shared == bat.shared == weights and hira.key == bat.key
    assert bytes_of_step([hira, bat, hira], 3) == 2 * hira.own + bat.own + weights
    one = scute(root, capsys, ["hira"], *OTHER)[0]
    assert one["bytes_step"] == hira.own + weights
    assert one["ms_step"] == pytest.approx(one["bytes_step"] / 1e9 + (4 * 4 + 2) * LAYERS * 2e-3)  # all of the last variant
    assert one["swap_in_ms"] == pytest.approx(hira.own / 32e6, rel=1e-3)  # the weights are there


def test_an_embedding_reads_a_column_for_each_row(root):
    assert cost_of(root, "lora_embed") == Cost(2 * 8 * HIDDEN, live=1, row=2 * 8)
    image = look(folder_of(root, "lora_embed"), config.read_base(make_base("llama", root), HALF), HALF).packed
    assert image.nbytes == 2 * 8 * (HIDDEN + VOCABULARY)


def test_a_batch_reads_a_tenant_once_a_shared_set_once_and_columns_by_row():
    a, b = Cost(own=100, live=2, shared=1000, key="x"), Cost(own=10, live=2, shared=1000, key="x")
    c = Cost(own=1, live=1, row=5)
    assert bytes_of_step([a], 1) == bytes_of_step([a], 9) == 1100 and bytes_of_step([a, b], 2) == 1110
    assert bytes_of_step([a, c], 7) == 1101 + 3 * 5 and bytes_of_step([], 4) == 0


def test_a_small_batch_reads_the_largest(root, capsys):
    names = ["ia3", "lora_rslora", "lora"]
    *each, total = scute(root, capsys, names, "--batch", "2", "--gpu", "l40s")
    by_name = {line["name"]: line["bytes_step"] for line in each}
    assert total["bytes_step"] == by_name["lora_rslora"] + by_name["lora"] > by_name["lora"] + by_name["ia3"]


def test_inspect_and_plan_agree_on_the_conversion(root, capsys):
    base = config.read_base(make_base("llama", root), HALF)
    for line in scute(root, capsys, ["lora", "ia3", "oft_head"])[:-1]:
        found = row(look(folder_of(root, line["name"]), base, HALF), base, HALF)
        assert line["bytes_step_lora64"] == found["bytes_as_lora64"]


def test_what_the_arena_holds_and_how_long_a_swap_takes(root):
    cost = Cost(512, 2, shared=1, key="x")
    tenant = plan_cli.Tenant("a", "VERA", cost, Cost(512, 1), nbytes=512 << 10, set_bytes=1 << 20, rank=256)
    gpu = Gpu(read=1e12, launch=0, memory=100 << 20, host=1e9, source="given")  # an arena of 10 MiB
    first, _, total = plan_cli.plan([tenant, tenant], 2, [1], gpu)
    assert first["resident"] == 18 and first["swap_in_ms"] == pytest.approx(1.5 * 1.048576)
    assert total["resident"] == 2 and total["swap_in_ms"] == pytest.approx(2 * 1.048576)
    many = plan_cli.plan([tenant] * 30, 30, [1], gpu)
    assert many[-1]["resident"] == 18


def test_the_benchmarks_predict_with_the_same_model(root, monkeypatch):
    """Their tenants, made without a file, cost what PEFT's adapters of the same size cost."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import byte_model as predictions
    from workloads import Kind, Workload, llama_shape

    shape = llama_shape(LAYERS, HIDDEN, KEY_VALUE, MLP)
    kinds = {"lora": Kind("lora", 8), "dora": Kind("dora", 4), "ia3": Kind("ia3"), "oft": Kind("oft", 16)}
    for name, kind in (kinds | {"vera_all": Kind("vera", 8)}).items():
        got, want = predictions.cost(kind, shape), cost_of(root, name)
        assert (got.own, got.live, got.shared) == (want.own, want.live, want.shared), name
    workload = Workload(16, ((kinds["lora"], 3), (Kind("vera", 8), 20)))
    vera, lora = (predictions.cost(kind, shape) for kind in (Kind("vera", 8), kinds["lora"]))
    assert predictions.bytes_of_workload(workload, shape) == 3 * lora.own + 16 * vera.own + vera.shared
    mixed = (kinds["lora"], 2), (kinds["oft"], 2)
    assert predictions.launches_of_workload(workload, shape) == (4 + 8) * LAYERS
    assert predictions.launches_of_workload(replace(workload, bs=25), shape) == 4 * LAYERS
    assert predictions.launches_of_workload(Workload(4, mixed), shape) == (4 + 4) * LAYERS
    assert predictions.launches_of_workload(Workload(4, mixed), shape, GPUS["L4"]) == (4 + 4 + 2) * LAYERS
    assert predictions.H200 is plan_cli.gpu_of(cli.build_parser().parse_args(["plan", "--model", "", "--adapters", ""]))


def test_the_table_of_predictions_and_measurements(monkeypatch):
    """Of our own rows on one GPU; the median is of those that add at least 0.1 ms."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    def row(workload: str, predicted: float | None, measured: float, backend: str = "scute") -> dict:
        given = {"workload": workload, "backend": backend, "bs": 16, "tenants": 16, "base_ms": 5.0}
        return given | {"tpot_ms": 5 + measured, "predicted_ms": None if predicted is None else 5 + predicted}

    rows = [row("lora_r16x16_bs16", 0.5, 0.4), row("oftx16_bs16", 0.8, 1.0), row("ia3x16_bs16", 0.3, 0.2)]
    rows += [row("none_bs16", 0.0, 0.01), row("mix5_vs_lora", 9.0, 1.0), row("lora_r16x1_bs1", None, 1.0)]
    lines = tables.plan([*rows, row("lora_r16x16_bs16", 0.5, 3.0, "triton")]).splitlines()
    assert [line.split(" | ")[-3:] for line in lines[2:6]] == [
        ["0.50", "0.40", "+25% |"], ["0.80", "1.00", "-20% |"], ["0.30", "0.20", "+50% |"], ["0.00", "0.01", " |"]
    ]  # fmt: skip
    assert lines[6:] == ["", "Median error, regardless of sign, of 3 rows that add at least 0.1 ms: 25%."]
    assert tables.plan([]).endswith("of 0 rows that add at least 0.1 ms: none.")


def test_reading_more_than_the_conversion_is_said(root, capsys):
    words = ["plan", "--model", make_base("llama", root), "--adapters", str(folder_of(root, "lora_r200"))]
    words += [str(folder_of(root, "lora")), str(folder_of(root, "lily"))]
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1 and notes[0].startswith("note: lora_r200 (LORA), served exactly, reads ")
    assert "left out: adapter 'lily' refused [unsupported_method]" in err
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 3 and "note: lora_r200" in err


def test_a_rank_without_graphs_is_said(root, capsys, monkeypatch):
    words = ["plan", "--model", make_base("llama", root), "--adapters", *(str(folder_of(root, n)) for n in ("lora_r200", "lora"))]
    monkeypatch.setattr(plan_cli.Options, "graph_rank", 200)
    assert cli.main(words) == 0 and "graphs" not in capsys.readouterr().out
    monkeypatch.setattr(plan_cli.Options, "graph_rank", 192)
    assert cli.main(words) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "CUDA graphs" in line]
    assert len(notes) == 1 and notes[0].startswith("note: lora_r200 (LORA) has rank 200: ") and ", 192 by default" in notes[0]


def test_known_gpus_are_plausible():
    """Bandwidth in bytes/s and memory in bytes, not GB or GiB by mistake."""
    assert {"H200", "H100", "A100-80GB", "L40S", "B200"} <= GPUS.keys()
    for gpu in GPUS.values():
        assert 0.3e12 <= gpu.read < 10e12 and 24e9 <= gpu.memory < 300e9 and gpu.host in (32e9, 64e9)
        assert 0.2e-6 < gpu.launch < 20e-6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "with 4,480 GB/s and 3.30 us a launch, both measured"),
        (["--gpu", "l4"], "with 300 GB/s by the datasheet and 3.30 us a launch, assumed, as measured on an H200"),
        (OTHER, "with 1,000 GB/s and 2.00 us a launch, as given"),
    ],
)
def test_it_says_where_its_constants_come_from(root, capsys, flags, message):
    words = ["plan", "--model", make_base("llama", root), "--adapters", str(folder_of(root, "lora")), *flags]
    assert cli.main(words) == 0 and message in capsys.readouterr().out.splitlines()
    assert cli.main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) and message in err.splitlines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "TPU"], "--gpu 'TPU': want one of H200, H100, H100-PCIe, A100-80GB,"),
        (["--bandwidth", "900"], "found --bandwidth, want --bandwidth, --launch, --memory together"),
        (["--gpu", "H100", *OTHER], "want one of --gpu, --measure"),
        (["--bandwidth", "0", "--launch", "1", "--memory", "1"], "--bandwidth: found '0', want a number above 0"),
        (["--bandwidth", "nan", "--launch", "1", "--memory", "1"], "--bandwidth: found 'nan', want a number above 0"),
        (["--batch", "0"], "--batch 0: want at least 1"),
        (["--model", "/nowhere"], "no config.json in '/nowhere'"),
        (["--adapters", "/nowhere"], "no folder '/nowhere'"),
        (["--plot", "added.jpg"], "want a name that ends in .png or .svg"),
        (["--plot", "/nowhere/added.png"], "there is no such folder"),
    ],
)
def test_bad_usage_ends_with_2_and_a_message(root, capsys, flags, message):
    words = ["plan", "--model", make_base("llama", root), "--adapters", str(folder_of(root, "lora")), *flags]
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and message in err and "Traceback" not in err and not out


def test_measuring_without_a_gpu_and_plotting_without_matplotlib_are_refused(root, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plan_cli, "find_spec", lambda name: None)
    words = ["plan", "--model", make_base("llama", root), "--adapters", str(folder_of(root, "lora"))]
    cases = {"--measure": "torch sees no CUDA GPU to measure", "--plot=a.png": "needs matplotlib"}
    for flag, message in cases.items():
        with pytest.raises(SystemExit) as end:
            cli.main([*words, flag])
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_nothing_to_plan_for_ends_with_2(root, capsys):
    words = ["plan", "--model", make_base("llama", root), "--adapters", str(folder_of(root, "lily"))]
    assert cli.main(words) == 2
    assert "no adapter to plan for is served" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_a_picture(root, capsys, tmp_path, ending):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"added.{ending}"
    scute(root, capsys, ["lora", "vera"], "--plot", str(file))
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"<svg" in content


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_measured_as_a_gpu(root, capsys):
    gpu = byte_model.measure()
    assert 0.3e12 < gpu.read < 6e12 and 0.2e-6 < gpu.launch < 20e-6 and 1e9 < gpu.host < 5e11
    assert gpu.memory == torch.cuda.get_device_properties(0).total_memory
    again = byte_model.measure()
    assert again.read == pytest.approx(gpu.read, rel=0.1) and again.launch == pytest.approx(gpu.launch, rel=0.5)
    *_, total = scute(root, capsys, ["lora", "oft"], "--measure")
    launches = (16 if gpu.linear_rows else 10) * LAYERS
    assert total["ms_step"] == pytest.approx(byte_model.added_ms(total["bytes_step"], launches, gpu), rel=0.5)


def test_the_commands_start_without_torch():
    """``scute serve`` and --help wait for no import of a command."""
    import subprocess

    code = "import sys; from scute_sgl import cli; cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
