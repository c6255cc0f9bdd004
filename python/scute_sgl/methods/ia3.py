"""(IA)3: one vector l per module.

    F(x) = gain * (x W + b)      gain = l, (out,)           the bias is scaled too
    F(x) = (x diag(l)) W + b     input_scale = l, (in,)     on feed-forward modules

A file keeps l as (out, 1) or, on a feed-forward module, (1, in): the shape decides. The config must agree, for
PEFT builds the layer from it. Lists match plain ends of names there (no dot needed); null means PEFT's table by
model type, whose decoders all have one of the names below.

Checked against peft/tuners/ia3/{layer,model}.py of PEFT 0.21.2.
"""

from __future__ import annotations

from torch import Tensor

from scute_sgl.errors import AdapterError
from scute_sgl.methods import common
from scute_sgl.names import Module, compile_pattern, group
from scute_sgl.slots import Adapter, BaseShape, Slots

FIELDS = {"target_modules": None, "exclude_modules": None, "feedforward_modules": None}
NEUTRAL = frozenset({"init_ia3_weights"})
PARAMETERS = ("ia3_l",)
DEFAULT_FEEDFORWARD = ["down_proj", "w2", "fc2", "dense_4h_to_h", "fc_out"]


def read(config: dict, tensors: dict[str, Tensor], base: BaseShape | None) -> Adapter:
    c = common.settings(config, FIELDS, NEUTRAL)
    is_feedforward = _feedforward(c["feedforward_modules"])

    def read_one(module: Module) -> Slots:
        if module.is_embedding:
            raise module.error("unsupported_method", "ia3_l", "(IA)3 has no embedding layer")
        vector = module.need("ia3_l", None, None)
        inputs, outputs = module.in_features, module.out_features
        by_shape = vector.shape[0] == 1 and inputs in (None, vector.shape[1])
        if not by_shape and (vector.shape[1] != 1 or outputs not in (None, vector.shape[0])):
            want = f"(1, {inputs or 'in'}) on a feed-forward module, else ({outputs or 'out'}, 1)"
            raise module.error("bad_shape", "ia3_l", f"found {tuple(vector.shape)}, want {want}")
        if by_shape != is_feedforward(module.file_path):
            found, listed = ("input", "without") if by_shape else ("output", "with")
            hint = f"found an {found} vector, but feedforward_modules={c['feedforward_modules']!r} {listed} this module"
            raise module.error("bad_config", "ia3_l", hint)
        return Slots(input_scale=vector.flatten()) if by_shape else Slots(gain=vector.flatten())

    modules, _ = group(tensors, base, PARAMETERS)
    return common.build("IA3", config, modules, read_one)


def _feedforward(names: object):
    if names is None:
        names = DEFAULT_FEEDFORWARD
    if isinstance(names, str):
        rule = compile_pattern(names, "feedforward_modules")
        return lambda path: rule.fullmatch(path) is not None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterError("bad_config", f"found {names!r}, want names or a regex", key="feedforward_modules")
    return lambda path: path.endswith(tuple(names))
