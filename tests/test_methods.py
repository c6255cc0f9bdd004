"""Every reader against PEFT: PEFT writes an adapter, reads it back and runs each module on random rows; the slots
of our reader, put into the formula of slots.py in float64, must give the same rows.

Ids such as B19 or R3 are rows of the project's log of public bug reports.
"""

import dataclasses

import make_adapters
import pytest
import torch
import transformers
from adapters_embed import UNTIED, WITH_NORMS
from adapters_folded import IN_FLOAT32 as FOLDED_IN_FLOAT32
from fakes import structured
from make_adapters import ADAPTERS, WITHOUT_EFFECT, edit_config, make_base, write_adapter
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from peft_answers import load_peft
from small_files import refused

from scute_sgl import checkpoint
from scute_sgl.config import read_base
from scute_sgl.methods import METHODS, peanut
from scute_sgl.slots import BaseShape, Slots

# Beside the plain Llama: on tied embeddings, on biased q, k, v, and on one KV head.
ON_OTHER_BASES = {
    "llama_tied": ["lora_head", "lora_embed", "lora_embed_head", "lora_ensure_tying", "dora_embed_head", "vera_head"],
    "qwen2": [
        "lora", "lora_bias_qv", "lora_bias_all", "lora_bias_lora_only", "dora", "dora_bias_all", "ia3", "ia3_no_ff",
        "ia3_many_ff", "vera_all", "vera_bias_only", "oft", "oft_one_term", "oft_bias_only", "lora_embed_head",
        "hra_gs", "adamss", "pvera", "fourierft_patterns", "waveft_proportional", "glora", "glora_constant", "glora_none",
        "glora_lora", "glora_lora_vector", "hira", "miss_bat_head",
        "pissa_dora", "kasa", "deft_qr",
        "adalora_no_alpha", "beft", "boft", "boft_factors", "delora_patterns", "miss_remainder", "tinylora",
        "randlora_bias", "randlora_drawn",
        "unilora_seed", "vblora_topk", "lora_bd", "lora_qalora_head", "alora_head",
        "lokr", "road", "road_4", "shira_seed", "supertuning_supra", "ln_tuning", "ln_tuning_default",
        "trainable_tokens", "trainable_tokens_head", "lora_tokens", "lora_tokens_head",
        "lora_tokens_both", "dora_tokens",
    ],
    "llama_norms": ["ln_tuning", "ln_tuning_saves", *WITH_NORMS],
    "mistral": ["lora", "dora", "ia3", "vera_all_linear_unsaved", "oft"],
}  # fmt: skip
# What PEFT rounds to float32 whatever it computes in: coft's eps / sqrt(n); the logits of top-k weights.
IN_FLOAT32 = {"oft_coft": 1e-7, "vblora_topk": 1e-6}
CASES = [("llama", name) for name in ADAPTERS | UNTIED]
CASES += [(base, name) for base, names in ON_OTHER_BASES.items() for name in names]


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def written(root):
    def write(base_name, name):
        base, folder = make_base(base_name, root), root / f"{base_name}-{name}"
        return base, str(folder) if folder.exists() else write_adapter(base, folder, name)

    return write


def shape_of(base_dir, dtype=torch.float32) -> BaseShape:
    config = transformers.AutoConfig.from_pretrained(base_dir)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            shapes[path] = (module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            shapes[path] = (module.num_embeddings, module.embedding_dim)
    norms, tied = read_base(base_dir, dtype).shape.norms, config.tie_word_embeddings
    return BaseShape(shapes, dtype=dtype, vocab_size=config.vocab_size, norms=norms, tied=tied)


def normal_form(slots: Slots, x, W, b0):
    """F(x) of slots.py in float64. W is the base weight (out, in)."""
    f = lambda t: t.double()  # noqa: E731
    if (source := slots.from_weight) is not None:
        P = W @ f(source.right) if source.right is not None else W if source.left is None else f(source.left) @ W
        more, bias = source.finish(P, b0 if slots.base_bias is None else f(slots.base_bias))
        bias = slots.bias if bias is None else bias if slots.bias is None else slots.bias + bias
        slots = dataclasses.replace(slots, terms=slots.terms + more, bias=bias)
    terms = [f(term.B) @ f(term.A) for term in slots.terms]
    s = torch.ones(len(W), dtype=torch.float64) if slots.scale is None else f(slots.scale)
    if slots.magnitude is not None:
        s = f(slots.magnitude) / (W + sum(terms)).norm(dim=1)
        terms = [s[:, None] * term for term in terms]
    xR = x
    if slots.input_scale is not None:
        xR = x * f(slots.input_scale)
    if slots.rotation is not None:
        blocks = f(slots.rotation)
        xR = (x.view(len(x), -1, 1, blocks.shape[-1]) @ blocks).view_as(x)
    y = (xR @ W.T) * s + sum((x @ term.T for term in terms), 0)
    if (shared := slots.shared) is not None:
        xA = x @ f(shared.A)[:, : x.shape[1]].T
        y = y + ((xA * f(shared.d)) @ f(shared.B)[: len(W)].T) * f(shared.e)
    total = b0 if slots.base_bias is None else f(slots.base_bias)
    for bias in (total, None if slots.bias is None else f(slots.bias)):
        y = y if bias is None else y + bias
    return structured(slots.structure, x, y if slots.gain is None else y * f(slots.gain), W)


@torch.no_grad()
def compare(adapter, base_dir, adapter_dir, dtype, tolerance):
    model = load_peft(base_dir, adapter_dir, dtype=torch.float32).to(dtype)
    fresh = load_peft(base_dir, None)
    generator = torch.Generator().manual_seed(0)
    changed, shape = 0, shape_of(base_dir)
    for path in shape.norms:
        theirs, before = model.get_submodule("base_model.model." + path), fresh.get_submodule(path).weight
        x = torch.randn(16, len(before), generator=generator)
        got = torch.nn.functional.rms_norm(x.double(), before.shape, adapter.norms.get(path, before).double(), 1e-6)
        assert ((got - theirs(x.to(dtype)).double()).abs().max() / got.abs().max()).item() <= max(tolerance, 1e-6), path
        changed = max(changed, (adapter.norms.get(path, before) - before).abs().max().item())
    for path in shape:
        theirs, own = model.get_submodule("base_model.model." + path), fresh.get_submodule(path)
        if path not in adapter.modules:
            assert not isinstance(theirs, (BaseTunerLayer, AuxiliaryTrainingWrapper)), f"{path} was dropped"
            continue
        slots, W = adapter.modules[path], own.weight.double()
        b0 = None if getattr(own, "bias", None) is None else own.bias.double()
        if slots.base_weight is not None:  # an embedding's too as the base stores it
            assert torch.equal(slots.base_weight.double(), W), path
        if isinstance(own, torch.nn.Embedding):
            W = W.T
            x, ids = torch.eye(W.shape[1], dtype=torch.float64), torch.arange(W.shape[1])
            want = theirs(ids)
        else:
            x = torch.randn(16, W.shape[1], generator=generator).double()
            rows = {"alora_offsets": [len(x)]} if adapter.invocation else {}  # all of them
            want = theirs(x[None].to(dtype), **rows)[0]  # as a batch, which some methods need
        got = normal_form(slots, x, W, b0)
        if (tokens := slots.tokens) is not None and isinstance(own, torch.nn.Embedding):
            got[tokens.ids] = tokens.rows.double()
        elif tokens is not None:
            got[:, tokens.ids] = x @ tokens.rows.double().T
        error = ((got - want.double()).abs().max() / want.abs().max()).item()
        assert error <= tolerance, (path, error)
        plain = x @ W.T + (0 if b0 is None else b0)
        changed = max(changed, ((got - plain).abs().max() / plain.abs().max()).item())
    return changed


@pytest.mark.parametrize("base_name, name", CASES)
def test_equals_peft(written, base_name, name):
    """B01 B08 B10 B14 B16 B31 B34 B43 B50 R1 R2 R6: each is a case of the table."""
    base_dir, folder = written(base_name, name)
    base = shape_of(base_dir)
    adapter = checkpoint.read_adapter(folder, base)
    changed = compare(adapter, base_dir, folder, torch.float32, 1e-5)
    assert changed > (0.001 if name.endswith("_near") else 0.02) or name in WITHOUT_EFFECT
    if name.startswith("adamss"):
        return  # PEFT's layer casts to the dtype that it was made in
    # The same numbers as a float64 file, so that the reader's own float32 roundings do not hide an error.
    config, tensors = checkpoint.load(folder)
    tensors = {key: t.double() if t.is_floating_point() else t for key, t in tensors.items()}
    adapter = METHODS[config["peft_type"]].read(config, tensors, base)
    tolerance = next((t for start, t in (IN_FLOAT32 | FOLDED_IN_FLOAT32).items() if name.startswith(start)), 1e-12)
    compare(adapter, base_dir, folder, torch.float64, tolerance)


@pytest.mark.parametrize("name", [
    "lora", "dora", "ia3", "vera", "vera_unsaved", "oft", "oft_block_share", "hra", "deft", "peanut", "glora",
    "glora_constant", "glora_lora", "hira", "miss_bat", "alora", "pissa", "olora", "kasa", "osf", "adamss", "pvera", "fourierft",
    "waveft",
    "lokr", "road", "shira", "supertuning",
])  # fmt: skip
def test_reads_without_a_base(written, name):
    """B05: enough for inspect. VeRA's matrices, if not saved, are placeholders then."""
    base_dir, folder = written("llama", name)
    with_base, alone = checkpoint.read_adapter(folder, shape_of(base_dir)), checkpoint.read_adapter(folder)
    assert alone.method == with_base.method == name.split("_")[0].upper()
    assert alone.modules.keys() == with_base.modules.keys()
    for path, slots in alone.modules.items():
        for f in dataclasses.fields(Slots):
            assert bool(getattr(slots, f.name) is None) == (getattr(with_base.modules[path], f.name) is None)
    if name == "vera_unsaved":
        assert slots.shared.A.is_meta and slots.shared.B.is_meta


def test_equal_shared_matrices_are_one_tensor(written):
    base_dir, folder = written("llama", "vera_all")
    shared = [slots.shared for slots in checkpoint.read_adapter(folder, shape_of(base_dir)).modules.values()]
    assert len({id(term.A) for term in shared}) == len({id(term.B) for term in shared}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vera_draws_what_peft_draws_on_this_dtype(written, dtype):
    """B16: bit for bit, and rounded to the base's dtype first."""
    base_dir, folder = written("llama", "vera_all_linear_unsaved")
    adapter = checkpoint.read_adapter(folder, shape_of(base_dir, dtype))
    theirs = load_peft(base_dir, folder, dtype).base_model
    shared = adapter.modules["model.layers.0.self_attn.q_proj"].shared
    assert torch.equal(shared.A.float(), theirs.vera_A["default"].float()) and shared.A.dtype == dtype
    assert torch.equal(shared.B.float(), theirs.vera_B["default"].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unilora_draws_what_peft_draws_on_this_dtype(written, dtype):
    base_dir, folder = written("llama", "unilora")
    term = checkpoint.read_adapter(folder, shape_of(base_dir, dtype)).modules["model.layers.1.mlp.down_proj"].terms[0]
    theirs = load_peft(base_dir, folder, dtype).get_submodule("model.model.layers.1.mlp.down_proj")
    A, B = theirs._get_lora_matrices("default")
    assert torch.equal(term.A, A) and torch.equal(term.B, B)


def test_dora_magnitude_key_with_and_without_weight(written):
    """B02: both spellings load; both at once is one too many."""
    base_dir, folder = written("llama", "dora_qvdown")
    base, (config, tensors) = shape_of(base_dir), checkpoint.load(folder)
    renamed = {k + ".weight" if k.endswith("magnitude_vector") else k: v for k, v in tensors.items()}
    first, second = (METHODS["LORA"].read(config, t, base).modules for t in (tensors, renamed))
    assert all(torch.equal(first[path].magnitude, second[path].magnitude) for path in first)
    with refused("unknown_key", "lora_magnitude_vector.weight"):
        METHODS["LORA"].read(config, tensors | renamed, base)


def test_files_of_16_bit_are_not_rounded_again(written):
    """B103: c * B of a bf16 file is kept in float32; everything else in the file's dtype."""
    base_dir, folder = written("llama", "lora_bf16_file")
    edit_config(folder, lora_alpha=11)
    slots = checkpoint.read_adapter(folder, shape_of(base_dir)).modules["model.layers.0.self_attn.q_proj"]
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert slots.terms[0].A.dtype == torch.bfloat16
    assert torch.equal(slots.terms[0].B, checkpoint.load(folder)[1][key].float() * (11 / 8))


@pytest.mark.parametrize("name", peanut.ACTIVATIONS)
def test_peanut_activations_are_those_of_transformers(name):
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(peanut.ACTIVATIONS[name](x), transformers.activations.ACT2FN[name](x))


def test_peft_written_oft_embedding_is_refused(root):
    base = make_base("llama", root)
    make_adapters._oft(target_modules=["embed_tokens", "q_proj"])(base, str(root / "oft_embed"))
    with refused("unsupported_method", "model.embed_tokens", "oft_embedding_R"):
        checkpoint.read_adapter(root / "oft_embed", shape_of(base))
