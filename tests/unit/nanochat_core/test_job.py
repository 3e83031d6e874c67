"""Digests of the files that a job made."""

import hashlib

from nanochat_core import job


def test_hashing_an_output_beats_for_every_block(tmp_path, monkeypatch):
    """A model of many gigabytes takes longer to hash than a rank may be silent."""
    monkeypatch.setattr(job, "_BLOCK", 4)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "ten.bin").write_bytes(b"0123456789")
    (tmp_path / "empty.bin").touch()
    beats = []
    found = job.digests_of(tmp_path, beat=lambda: beats.append(None))
    assert len(beats) == 3
    assert found == {
        "empty.bin": hashlib.sha256().hexdigest(),
        "sub/ten.bin": hashlib.sha256(b"0123456789").hexdigest(),
    }
