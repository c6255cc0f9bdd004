"""Refusals as text: what names and files may hold reaches no terminal."""

from scute_sgl.errors import printable


def test_names_reach_no_terminal_as_commands():
    assert printable("sql\n\x1b[2J\u202ez") == "sql\\n\\x1b[2J\\u202ez" and printable("日本 é") == "日本 é"
