"""``scute inspect`` against loading: what it calls servable takes these bytes, what it refuses is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_adapters import ADAPTERS, REFUSED, edit_config, make_base, write_adapter
from servers import Kit
from test_bad_adapters import SPOILED
from test_readme import targets_of

from scute_sgl import cli, config, targets
from scute_sgl.checkpoint import read_adapter
from scute_sgl.errors import AdapterError
from scute_sgl.fold import fold_adapter, live_slots
from scute_sgl.image import pack
from scute_sgl.inspection import look, row
from scute_sgl.methods import METHODS
from scute_sgl.pool import Pool
from scute_sgl.support import SUPPORT

FIELDS = "name method servable reason live folded modules rank_max bytes shared_bytes bytes_as_lora64".split()
FIELDS += ["needs_base_weight", "invocation_tokens"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("inspect")


def folder_of(root: Path, name: str) -> Path:
    return Path(Kit(root).adapter(name, "qwen2"))


def scute(capsys, *words: object) -> tuple[int, list[dict]]:
    code = cli.main(["inspect", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*ADAPTERS, *REFUSED])
def test_a_row_is_what_loading_finds(root, name):
    """With weights and by config.json alone, on a base with biases and in 16 bit."""
    folder, dtype = folder_of(root, name), torch.bfloat16
    targets, shape = targets_of(make_base("qwen2", root))
    base = config.read_base(make_base("qwen2", root), dtype)
    shape.dtype = dtype
    found = row(look(folder, base, dtype), base, dtype)
    alone = row(look(folder, None, dtype), None, dtype)
    assert [*found] == [*alone] == FIELDS
    try:
        adapter = read_adapter(folder, shape)
        folded = fold_adapter(adapter, targets)
        image = pack(folded, dtype)
    except AdapterError as error:
        assert not found["servable"] and found["reason"].startswith(f"[{error.code}] ") and error.key in found["reason"]
        return
    pool = Pool(1 << 22, 4, len(targets), "cpu", dtype)
    pool.register(name, image)
    pool.ensure([name])
    stats = pool.stats()
    assert found["servable"] and found["reason"] is None and found["method"] == adapter.method
    assert found["bytes"] + found["shared_bytes"] == stats["used"] and found["shared_bytes"] == stats["shared_bytes"]
    assert found["live"] == live_slots([f for _, f in folded.values()])
    assert image.rank_max == -(-found["rank_max"] // 8) * 8
    for key, value in alone.items():  # the adapter alone tells less, and nothing else
        assert value in (None, found[key]), key


def test_every_method_of_the_table_is_among_them(root):
    labels = {look(folder_of(root, name), None, torch.float16).method for name in ADAPTERS}
    assert labels == {line.label for line in SUPPORT}


def test_the_adapter_alone_tells_the_bytes_of_plain_terms_and_rotations(root):
    for name, known in {"lora": True, "oft": True, "boft": False, "dora": False, "ia3": False, "vera": False}.items():
        found = row(look(folder_of(root, name), None, torch.float16), None, torch.float16)
        assert (found["bytes"] is not None) is known, name
        assert found["servable"] is None and found["modules"] > 0


def test_rank_64_conversion_has_the_bytes_of_such_a_lora(root):
    base = config.read_base(make_base("qwen2", root), torch.float16)
    paths = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    found = row(look(folder_of(root, "lora_full_paths"), base, torch.float16), base, torch.float16)
    assert found["bytes_as_lora64"] == sum(2 * 64 * sum(base.shape[path]) for path in paths)
    assert found["bytes"] == found["bytes_as_lora64"] // 8 and found["rank_max"] == 8


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_targets_by_config_are_those_of_the_served_model(tmp_path, ranks):
    """But for the names of layers that SGLang fuses and for their order."""
    from test_targets import CONFIG, HEADS, HIDDEN, KV_HEADS, MLP, SIZE, model

    assert (CONFIG.hidden_size, CONFIG.num_attention_heads * SIZE) == (HIDDEN, HEADS * SIZE)
    fields = CONFIG.to_dict() | {"num_key_value_heads": KV_HEADS, "intermediate_size": MLP}
    CONFIG.from_dict(fields).save_pretrained(tmp_path)
    base = config.read_base(str(tmp_path), torch.float16, ranks)
    for rank in range(ranks):
        served = {t.path: t for site in targets.find_sites(model(rank, ranks)) for t in site.targets}
        for path, want in served.items():
            got = base.targets[rank][path]
            for name in ("kind", "in_features", "out_features", "inputs", "outputs", "gated_by"):
                assert getattr(got, name) == getattr(want, name), (path, name)


@pytest.mark.parametrize("name", ["lora", "dora", "ia3_no_ff", "vera_all", "oft", "hra", "deft", "lora_embed_head"])
def test_the_bytes_of_two_ranks_are_those_of_the_larger(root, name):
    folder, one = folder_of(root, name), config.read_base(make_base("qwen2", root), torch.float16)
    two = config.read_base(make_base("qwen2", root), torch.float16, 2)
    whole, half = (row(look(folder, base, torch.float16), base, torch.float16) for base in (one, two))
    assert half["servable"], half["reason"]
    assert whole["bytes"] / 2 <= half["bytes"] < whole["bytes"] and half["shared_bytes"] == whole["shared_bytes"]


@pytest.mark.parametrize("name", ["trainable_tokens", "waveft", "supertuning"])
def test_any_rank_may_hold_the_larger_part(root, name):
    """Values at places of their own are not shared out evenly."""
    folder, base = folder_of(root, name), config.read_base(make_base("qwen2", root), torch.float16, 2)
    for first in (0, 1):
        turned = replace(base, targets=base.targets[:: 1 - 2 * first])
        found = row(look(folder, turned, torch.float16), turned, torch.float16)
        assert found["servable"], found["reason"]


def test_what_ranks_cannot_share_is_refused_as_by_a_server(root):
    base = config.read_base(make_base("qwen2", root), torch.float16, 2)
    found = row(look(folder_of(root, "pissa"), base, torch.float16), base, torch.float16)
    assert found["reason"].startswith("[unsupported_method] model.layers.") and "want --tp-size 1" in found["reason"]


def test_a_folder_of_adapters_means_all_of_them(root, capsys):
    names = ["lora", "dora", "lily"]
    for name in names:
        folder_of(root / "several", name)
    base = make_base("qwen2", root)
    code, rows = scute(capsys, root / "several" / "qwen2-adapters", "--model", base, "--dtype", "float32")
    assert code == 0 and {row["name"]: row["servable"] for row in rows} == {"dora": True, "lily": False, "lora": True}
    assert [*rows[0]] == FIELDS
    dora, lily, lora = rows
    assert lily["reason"].startswith("[unsupported_method] peft_type: peft_type=LILY") and lily["method"] == "LILY"
    assert dora["needs_base_weight"] and dora["folded"] == ["m"]
    assert not lora["needs_base_weight"] and lora["folded"] == []


def test_the_table_says_what_it_does_not_know(root, capsys):
    assert cli.main(["inspect", *(str(folder_of(root, name)) for name in ("lora", "ia3", "lora_saves_head"))]) == 0
    out = capsys.readouterr().out
    ia3 = next(line for line in out.splitlines() if line.startswith("ia3 "))
    assert ia3.split() == ["ia3", "IA3", "?", "?", "6", "?", "?", "?", "?", "-"]
    assert "give --model DIR" in out and "refused: 1 of 3" in out and "[bad_config] modules_to_save" in out


def test_the_config_alone_is_enough(root, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes((Path(make_base("qwen2", root)) / "config.json").read_bytes())
    code, (found,) = scute(capsys, folder_of(root, "dora"), "--model", tmp_path)
    assert code == 0 and found["servable"] and "b" in found["live"]


def test_a_value_that_the_dtype_cannot_hold_is_refused(root, tmp_path, capsys):
    write_adapter(make_base("qwen2", root), tmp_path / "huge", "lora")
    edit_config(tmp_path / "huge", lora_alpha=1e8)
    base = make_base("qwen2", root)
    _, (half,) = scute(capsys, tmp_path / "huge", "--model", base, "--dtype", "float16")
    _, (wide,) = scute(capsys, tmp_path / "huge", "--model", base, "--dtype", "bfloat16")
    assert half["reason"].startswith("[bad_config] ") and "not finite in float16" in half["reason"] and wide["servable"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere"], "no folder '/nowhere'"),
        ([], "required: ADAPTER"),
        (["ADAPTER", "--tp", "0"], "--tp 0: want at least 1"),
        (["ADAPTER", "--tp", "2"], "--tp needs --model"),
        (["ADAPTER", "--tp", "3", "--model", "BASE"], "4 attention heads cannot be split among 3 ranks"),
        (["ADAPTER", "--model", "/nowhere"], "no config.json in '/nowhere'"),
        (["ADAPTER", "--model", "BROKEN"], "Transformers cannot make the model"),
        (["ADAPTER", "--model", "QUANTISED"], "is quantised; adapters are exact on unquantised weights only"),
        (["ADAPTER", "--dtype", "int3"], "--dtype int3: want auto or one of"),
        (["ADAPTER", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_usage_ends_with_2_and_a_message(root, tmp_path, capsys, words, message):
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    base, quantised = make_base("qwen2", root), tmp_path / "quantised"
    quantised.mkdir()
    fields = json.loads((Path(base) / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (quantised / "config.json").write_text(json.dumps(fields))
    places = {"ADAPTER": folder_of(root, "lora"), "BASE": base, "BROKEN": tmp_path, "QUANTISED": quantised}
    with pytest.raises(SystemExit) as end:
        cli.main(["inspect", *(str(places.get(word, word)) for word in words)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and message in err and "Traceback" not in err and not out


def test_nothing_readable_ends_with_2(tmp_path, capsys):
    code, (found,) = scute(capsys, tmp_path)
    assert code == 2 and found["reason"].startswith("[not_found] adapter_config.json: no adapter_config.json")


# Only the numbers of W and the size of an arena show these.
UNSEEN = {"another base weight", "larger than the arena", "a file that no arena could hold"}


@pytest.mark.parametrize("what", [what for what in SPOILED if what not in UNSEEN])
def test_a_spoiled_adapter_is_a_row_with_the_servers_reason(root, tmp_path, what):
    spoil, code, text = SPOILED[what]
    base, folder = make_base("llama", root), tmp_path / "sql"
    spoil(Path(write_adapter(base, folder, "lora")))
    known = config.read_base(base)
    found = row(look(folder, known, known.dtype), known, known.dtype)
    assert found["servable"] is False and found["reason"].startswith(f"[{code}] ") and text in found["reason"]


def test_an_unforeseen_error_is_a_row(root, monkeypatch):
    def fail(*_):
        raise KeyError("surprise")

    monkeypatch.setattr(METHODS["LORA"], "read", fail)
    found = row(look(folder_of(root, "lora"), None, torch.float16), None, torch.float16)
    assert found["servable"] is False and found["reason"] == "[bad_config] KeyError: 'surprise'"
