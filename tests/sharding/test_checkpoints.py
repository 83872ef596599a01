"""Checkpoints do not remember the devices they were saved on."""

from __future__ import annotations


def test_jax_01_02_03_saved_on_eight_devices_and_restored_on_others(run_program, tmp_path):
    found = run_program("checkpoints_on_meshes.py", str(tmp_path))
    assert found.pop("again") == 0.0  # on the same mesh training goes on bit for bit
    assert found.pop("export")  # and the export has the bytes of one from one device
    assert len(found) == 4 and all(result["equal"] and result["placed"] for result in found.values())
    after = [result["after"] for result in found.values() if "after" in result]
    assert len(after) == 1 and after[0] < 2e-5  # of a learning rate of 1e-3
