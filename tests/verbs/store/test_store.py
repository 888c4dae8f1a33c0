"""The command that lists, checks and prunes a store."""

import pytest

import crosslayer
from crosslayer.codec.store import Files
from tests.codec.test_store import blocks, saved


def test_a_store_is_listed_checked_and_pruned(tmp_path):
    saved(tmp_path)
    held = crosslayer.store(str(tmp_path))
    size = sum(path.stat().st_size for path in blocks(tmp_path))
    assert (held.blocks, held.beginnings, held.tokens, held.bytes, held.damaged) == (4, 1, 60, size, 0)
    assert held.exit_status == 0
    path = blocks(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert crosslayer.store(str(tmp_path), verify=False).damaged == 0
    held = crosslayer.store(str(tmp_path))
    assert held.damaged == 1 and held.exit_status == 1 and path.exists()
    held = crosslayer.store(str(tmp_path), remove_damaged=True)
    assert held.damaged == 1 and held.exit_status == 0 and not path.exists()
    assert crosslayer.store(str(tmp_path), limit="1 B").pruned > 0
    assert crosslayer.store(str(tmp_path)).blocks == 0


def test_blocks_of_another_release_and_files_out_of_reach_are_kept(tmp_path, monkeypatch):
    saved(tmp_path)
    path = blocks(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[4:6] = (99).to_bytes(2, "little")  # the version
    path.write_bytes(data)
    held = crosslayer.store(str(tmp_path), remove_damaged=True)
    assert (held.unread, held.damaged, held.exit_status) == (1, 0, 0) and path.read_bytes() == data

    def fails(*arguments):
        raise OSError("out of reach")

    monkeypatch.setattr(Files, "read", fails)
    held = crosslayer.store(str(tmp_path), remove_damaged=True)
    assert (held.unread, held.damaged) == (4, 0) and len(blocks(tmp_path)) == 4


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not exist"):
        crosslayer.store(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="`limit` must be a size"):
        crosslayer.store(str(tmp_path), limit="much")
