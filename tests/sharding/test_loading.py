"""Checkpoints go from disk straight to the devices that hold them."""

from __future__ import annotations

import json


def test_a_hugging_face_directory_is_read_onto_a_mesh(run_program, tmp_path):
    """Equal arrays in the right places, random ones too; the host holds the share of one device, and one tensor at a time."""
    found = run_program("loaded_on_meshes.py", str(tmp_path))
    experts = found.pop("experts")
    assert len(found) == 4 and all(result["equal"] and result["placed"] and result["random_equal"] for result in found.values())
    shares = {name: experts // result["share"] for name, result in found.items()}
    assert shares == {"{}": 1, **{json.dumps(sizes): count for sizes, count in EXPECTED}}
    assert {result["tensor"] for result in found.values()} == {experts // 32}  # one expert's matrix, larger than any other tensor here


EXPECTED = [({"fsdp": 8}, 8), ({"data": 2, "fsdp": 2, "expert": 2}, 4), ({"expert": 4, "tensor": 2}, 8)]
