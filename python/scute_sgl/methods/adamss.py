"""AdaMSS: low-rank terms that each write to one cluster of the outputs.

    F(x) = x W + b + sum_k (x A_k^T) B_k^T,   A_k = adamss_A.k adamss_newB,   B_k: adamss_B.k in the rows of cluster k

On a layer with a bias newB has a column more, for a constant input: it goes to b. A file does not hold the clusters.
PEFT finds them again when it loads: k-means, with a fixed seed, of the rows of U, from the randomised SVD U S V of
[W b0]. The same calls are made here, where W lies. newB is the V of the training's SVD, which tells whether this one
found the same space: the random numbers of a CPU and a GPU differ. Clusters do not depend on signs or rotations of U.

Checked against peft/tuners/adamss/{layer,utils}.py of PEFT 0.21.2, with scikit-learn 1.9.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.linalg import has_numbers
from scute_sgl.methods import common
from scute_sgl.names import Module, group
from scute_sgl.slots import Adapter, BaseShape, FromWeight, Slots, Term

FIELDS = {name: None for name in ("target_modules", "layers_to_transform", "layers_pattern")} | {
    "r": 100,
    "num_subspaces": 5,
    "random_seed": 0,
}
NEUTRAL = frozenset(  # ranks are read from the shapes; the rest steers training
    "subspace_rank use_dynamic_rank svd_threshold use_asa asa_target_subspaces init_warmup final_warmup mask_interval "
    "asa_importance_beta asa_uncertainty_beta asa_schedule_exponent".split()
)
MAX_CLUSTERS = 1024


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    r, count, seed = common.rank(c["r"]), c["num_subspaces"], c["random_seed"]
    if not 1 <= count <= MAX_CLUSTERS:
        raise AdapterError("bad_config", f"found {count}, want 1 to {MAX_CLUSTERS}", key="num_subspaces")
    if not 0 <= seed < 1 << 63:
        raise AdapterError("bad_config", f"found {seed}, want 0 <= seed < 2**63", key="random_seed")
    if find_spec("sklearn") is None:
        hint = "its clusters of outputs are found by scikit-learn, which is not installed (pip install scikit-learn)"
        raise AdapterError("unsupported_method", hint, key="peft_type")

    def read_one(module: Module) -> Slots:
        common.refuse_embedding(module, "AdaMSS")
        newB = module.need("adamss_newB", None, None).double()
        rank, width = newB.shape
        if module.in_features is not None:
            if width - module.in_features not in (0, 1) or rank != min(r, module.out_features, width):
                want = f"({min(r, module.out_features, width)}, {module.in_features} or one more)"
                raise module.error("bad_shape", "adamss_newB", f"found {tuple(newB.shape)}, want {want}")
        clusters = min(count, module.out_features or count)
        A = [module.need(f"adamss_A.{k}", None, rank).double() @ newB for k in range(clusters)]
        B = [module.need(f"adamss_B.{k}", None, len(A[k])).double() for k in range(clusters)]
        if "base_layer.bias" in module.tensors:
            raise module.error("unknown_key", "base_layer.bias", "AdaMSS trains no bias; want the base's own")

        def finish(W: Tensor, b0: Tensor | None) -> tuple[tuple[Term, ...], Tensor | None]:
            if width != W.shape[1] + (b0 is not None):
                hint = f"found {width} columns; want {W.shape[1]}, and one more exactly if the layer has a bias"
                raise module.error("wrong_base", "adamss_newB", hint)
            if has_numbers(W):
                rows = cluster_rows(W, b0, newB, clusters, seed, module)
            else:  # any clusters of the file's sizes
                rows = [torch.arange(len(part)) for part in B]
            if [len(own) for own in rows] != [len(part) for part in B]:
                found, want = ([len(part) for part in parts] for parts in (B, rows))
                hint = f"found parts of {found} outputs, but the base's clusters have {want}"
                raise module.error("wrong_base", "adamss_B", hint)
            whole = [torch.zeros(len(W), part.shape[1], dtype=part.dtype) for part in B]
            placed = [into.index_copy(0, own, part) for into, own, part in zip(whole, rows, B)]
            joined_A, joined_B = torch.cat(A), torch.cat(placed, dim=1)
            bias = None if b0 is None else joined_B @ joined_A[:, -1]
            return (Term(joined_A[:, : W.shape[1]], joined_B),), bias

        return Slots(from_weight=FromWeight(finish))

    parts = [f"adamss_{side}.{k}" for side in "AB" for k in range(count)]
    modules, _ = group(tensors, base, ("adamss_newB", *parts))
    return common.build("ADAMSS", config, modules, read_one)


def cluster_rows(W: Tensor, b0: Tensor | None, V: Tensor, count: int, seed: int, module: Module) -> list[Tensor]:
    """The outputs of every cluster, ascending. AdapterError ``wrong_base`` if the SVD spans another space than V."""
    from sklearn.cluster import KMeans

    M = W.float() if b0 is None else torch.cat([W.float(), b0.to(W.device).float()[:, None]], dim=1)
    with torch.random.fork_rng(devices=[W.device] if W.device.type == "cuda" else []):
        torch.manual_seed(seed)
        U, _, own_V = torch.svd_lowrank(M, q=len(V), niter=2)
    shared = (V.to(M.device, torch.float32) @ own_V).square().sum().item() / len(V)
    if shared < 0.999:
        hint = (
            f"found only {shared:.1%} of the space that the adapter was trained in among the base's leading singular "
            f"vectors, as {W.device.type} finds them; want its base, and the kind of device that it was created on"
        )
        raise module.error("wrong_base", "adamss_newB", hint)
    means = KMeans(count, init="random", n_init=1, max_iter=10, random_state=123456789)
    labels = torch.from_numpy(means.fit_predict(U.cpu().numpy())).long()
    return [torch.where(labels == k)[0] for k in range(count)]
