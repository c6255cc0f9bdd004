"""Refusals as text and on their way to other processes."""

import pickle

import pytest

from scute_sgl.errors import LONGEST, AdapterError, NeedsBase, printable


@pytest.mark.parametrize("kind", [AdapterError, NeedsBase])
def test_a_refusal_survives_a_pickle(kind):
    for fields in ({}, {"adapter": "sql\ud800", "module": "model.x", "key": "k" * 300}):
        error = kind("bad_shape", "h" * (LONGEST + 1), **fields)
        same = pickle.loads(pickle.dumps(error))
        assert type(same) is kind and vars(same) == vars(error) and str(same) == str(error)


def test_names_reach_no_terminal_as_commands():
    assert printable("sql\n\x1b[2J\u202ez") == "sql\\n\\x1b[2J\\u202ez" and printable("日本 é") == "日本 é"
