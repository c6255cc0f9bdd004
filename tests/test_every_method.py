"""Every method that the installed PEFT knows is either served or refused for a reason that somebody wrote down."""

import json

import peft
import pytest
from small_files import lora_config, refused

from scute_sgl.checkpoint import CONFIG, WEIGHTS, read_adapter
from scute_sgl.methods import METHODS, NOT_SERVED

PEFT_TYPES = {member.value for member in peft.PeftType}


def test_every_method_of_peft_is_served_or_refused_for_a_reason():
    """A new release of PEFT with a new method fails here until someone decides about it."""
    assert not PEFT_TYPES - METHODS.keys() - NOT_SERVED.keys(), "serve it, or say in methods/__init__.py why not"
    assert not METHODS.keys() & NOT_SERVED.keys()
    assert not NOT_SERVED.keys() - PEFT_TYPES


@pytest.mark.parametrize("method", sorted(NOT_SERVED))
def test_the_refusal_tells_the_reason(tmp_path, method):
    (tmp_path / CONFIG).write_text(json.dumps(lora_config(peft_type=method)))
    (tmp_path / WEIGHTS).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with refused("unsupported_method", f"peft_type={method}: {NOT_SERVED[method]}; supported: "):
        read_adapter(tmp_path)
