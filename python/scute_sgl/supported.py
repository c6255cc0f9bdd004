"""What of every method is served: the words that no code states. ``support.py`` makes a table of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Support:
    """``live`` are the slots that cost something in every step, for some adapter of the method."""

    label: str  # Adapter.method
    peft_type: str  # several names of one method are separated by spaces
    served: str
    live: str
    folded: str
    reads_weight: bool = False  # whether folding needs the base weight


SUPPORT = (
    Support(
        "LORA", "LORA",
        "rsLoRA, BD-LoRA, QALoRA (beside an unquantised base), VeLoRA, MonteCLoRA, rank and alpha patterns, "
        "`lora_bias`, `bias`, any linear layer, `embed_tokens`, `lm_head`; `trainable_token_indices`",
        "b A B rows", "alpha / r → B; trained biases → b",
    ),
    Support(
        "DORA", "LORA",
        "all of LoRA but `lora_bias`; `embed_tokens` and `lm_head` too",
        "s b A B rows", "m / ‖W + BA‖ → s and B; base bias → b", reads_weight=True,
    ),
    Support(
        "ALORA", "LORA",
        "`alora_invocation_tokens`, from their last occurrence in a prompt on; `lora_bias`, rsLoRA, patterns, any "
        "linear layer and `lm_head`",
        "b A B", "as LORA",
    ),
    Support(
        "PISSA", "LORA",
        "all of LoRA but embeddings, unconverted; tensor parallelism only where a layer is whole",
        "b A B", "minus the r largest singular triplets of W → a second term", reads_weight=True,
    ),
    Support(
        "OLORA", "LORA",
        "as PISSA",
        "b A B", "minus α / r times the first r factors of W = QR → a second term", reads_weight=True,
    ),
    Support(
        "KASA", "LORA",
        "as PISSA, without `use_dora` and `lora_bias`",
        "b A B", "`lora_diag` → B; minus the r smallest singular triplets of W → a second term", reads_weight=True,
    ),
    Support(
        "IA3", "IA3",
        "any linear layer and `lm_head`, as feed-forward module or not",
        "R s", "a gated `down_proj`'s vector → s of `up_proj`",
    ),
    Support(
        "LN_TUNING", "LN_TUNING",
        "`input_layernorm`, `post_attention_layernorm` and the last norm of Llama, Mistral, Qwen2 and Qwen3 models; "
        "likewise as `modules_to_save` of any method without shared matrices there",
        "R", "trained over base weight → R of the layers behind the norm, and A", reads_weight=True,
    ),
    Support(
        "VERA", "VERA",
        "saved or redrawn projections, any seed and rank, `bias`, any linear layer and `lm_head`",
        "b A B d e", "A and B kept once for all adapters with equal ones",
    ),
    Support(
        "PVERA", "PVERA",
        "as VERA; without `sample_at_inference`",
        "b A B d e", "as VERA; the means' half of A and d",
    ),
    Support(
        "FOURIERFT", "FOURIERFT",
        "any n and seed, patterns, `bias`, any linear layer and `lm_head`",
        "b A B d e", "waves of rank 2 n for each shape of layer, kept once → A, B; scaling → d",
    ),
    Support(
        "WAVEFT", "WAVEFT",
        "`db1`, or `use_idwt=False`; any n and seed, patterns, `bias`, any linear layer and `lm_head`",
        "b S", "scaling and the wavelet's transform → S, of four values for each number",
    ),
    Support(
        "OFT", "OFT",
        "both Cayley forms, `block_share`, `coft`, `bias`, files since PEFT 0.16, any linear layer and `lm_head`",
        "R b", "Cayley transform → R",
    ),
    Support(
        "HRA", "HRA",
        "with and without `apply_GS`, `bias`, any linear layer and `lm_head`",
        "b A B", "reflections → A and B = −WUT", reads_weight=True,
    ),
    Support(
        "DEFT", "DEFT",
        "relu and qr, `alpha`, `para`, `bias`, any linear layer and `lm_head`",
        "b A B", "κR − PᵀW → A", reads_weight=True,
    ),
    Support(
        "PEANUT", "PEANUT",
        "any depth, common activations, any linear layer and `lm_head`",
        "A B", "the network of W → A; scaling → B", reads_weight=True,
    ),
    Support(
        "GLORA", "GLORA",
        "every form of A, B, C, D and E, `bias`, any linear layer and `lm_head`; with matrices it reads W again in every "
        "step, for S = W ∘ A",
        "s b A B S", "1 + A → s; b₀D + E + WC → b", reads_weight=True,
    ),
    Support(
        "ADAMSS", "ADAMSS",
        "fixed and dynamic ranks, any linear layer and `lm_head`; with scikit-learn, on the kind of device that it was "
        "created on; tensor parallelism only where a layer is whole",
        "b A B", "clusters of the rows of W → A, B; the bias column → b", reads_weight=True,
    ),
    Support(
        "OSF", "OSF",
        "any `effective_rank`; as large as W itself; tensor parallelism only where a layer is whole",
        "A B", "S → B; minus the low part of W → a second term", reads_weight=True,
    ),
    Support(
        "ADALORA", "ADALORA",
        "pruned or not, `bias`, any linear layer and `lm_head`",
        "b A B", "E → A; alpha / (init_r + 1e-5) → B",
    ),
    Support(
        "BEFT", "BEFT",
        "any linear layer and `lm_head`, with a bias or without",
        "b", "",
    ),
    Support(
        "BOFT", "BOFT",
        "any block size and number of butterfly factors, `bias`, any linear layer and `lm_head`",
        "R s b", "Cayley transform and product of the factors → R; s - 1 → s; base bias → b",
    ),
    Support(
        "DELORA", "DELORA",
        "rank patterns, `bias`, any linear layer and `lm_head`",
        "b A B", "weight norms → A; lambda / (r ‖A‖ ‖B‖) → B",
    ),
    Support(
        "GRALORA", "GRALORA",
        "any k, hybrid ranks, `bias`, any linear layer and `lm_head`",
        "b A B", "blocks and zeros → A, B of rank k r; alpha / (r + hybrid_r) → B",
    ),
    Support(
        "HIRA", "HIRA",
        "rank patterns, any linear layer and `lm_head`; reads W again in every step, for S = W ∘ BA",
        "S", "",
    ),
    Support(
        "LOHA", "LOHA",
        "rank and alpha patterns, any linear layer and `lm_head`",
        "A B", "rank r² → A, B; alpha / r → B",
    ),
    Support(
        "LOKR", "LOKR",
        "all splits, rank and alpha patterns, any linear layer and `lm_head`",
        "S", "alpha / r → S = kron(w1, w2); w1's own factors → w1",
    ),
    Support(
        "MISS", "MISS BONE",
        "all `init_weights`, `bias`, any linear layer and `lm_head`; \"bat\" reads W again in every step, for "
        "S = WM + M in blocks, and tensor parallelism must not cut those",
        "b A B S", "sums of inputs → A",
    ),
    Support(
        "POLY", "POLY",
        "one task for each tenant: `task_id` in its `adapter_config.json`; any linear layer and `lm_head`",
        "A B", "mixture of the task's skills → A, B; 1 / r → B",
    ),
    Support(
        "RANDLORA", "RANDLORA",
        "saved or redrawn projections, dense or sparse, any seed and rank, `bias`, any linear layer and `lm_head`; has "
        "the rank of the whole weight, whatever r",
        "b A B", "lambda, gamma and the projections → A, B of rank min(in, out); randlora_alpha / r → B",
    ),
    Support(
        "ROAD", "ROAD",
        "road_1, road_2 and road_4, any group size, any linear layer and `lm_head`; tensor parallelism only where a "
        "layer's inputs are whole, and its groups",
        "mix", "α cos θ, α sin θ → mix",
    ),
    Support(
        "SHIRA", "SHIRA",
        "any mask, any linear layer and `lm_head`",
        "S", "round(W + values) - W → S", reads_weight=True,
    ),
    Support(
        "SUPERTUNING", "SUPERTUNING",
        "any sparsity, with saved indices; Supra's `r`; any linear layer and `lm_head`",
        "A B S", "round(W + values) - W → S; lora_alpha / r → B", reads_weight=True,
    ),
    Support(
        "TINYLORA", "TINYLORA",
        "saved or redrawn projections, any seed and tying, `bias`, any linear layer, `embed_tokens`, `lm_head`",
        "b A B", "sum of v P → B",
    ),
    Support(
        "TRAINABLE_TOKENS", "TRAINABLE_TOKENS",
        "`embed_tokens`, a head tied to it, `lm_head`",
        "rows", "",
    ),
    Support(
        "UNILORA", "UNILORA",
        "saved or redrawn indices, any seed and rank, `bias`, any linear layer and `lm_head`",
        "b A B", "theta[indices] * scales → A, B",
    ),
    Support(
        "VBLORA", "VBLORA",
        "whole or top-k files, `bias`, any linear layer and `lm_head`",
        "b A B", "vectors of the bank → A, B",
    ),
)  # fmt: skip
