"""The one writer of files: whole or absent, and a line for the user when the disk refuses."""

import os
import stat

import pytest

from trace_jax.errors import UserError
from trace_jax.files import require_writable, write_atomic


def test_writes_chunks_and_replaces(tmp_path):
    path = tmp_path / "file.bin"
    write_atomic(path, [b"old"])
    write_atomic(path, iter([b"new ", memoryview(b"content")]))
    assert path.read_bytes() == b"new content" and os.listdir(tmp_path) == ["file.bin"]


def test_the_mode_is_that_of_an_ordinary_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomic(tmp_path / "file", [b""])
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("no JSON")])
def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def chunks():
        yield b"new"
        raise error

    expected = UserError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="file: cannot be written .No space left on device" if isinstance(error, OSError) else None):
        write_atomic(path, chunks())
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_missing_folders_are_made_only_when_asked(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(path, [b"x"])
    write_atomic(path, [b"x"], parents=True)
    assert path.read_bytes() == b"x"
    with pytest.raises(UserError, match="cannot be written"):
        write_atomic(path / "below", [b"x"], parents=True)


def test_an_output_is_refused_where_it_cannot_be_written(tmp_path, monkeypatch):
    """The folder itself where it is there, else the nearest one above; root may write anywhere, so the question is answered for it."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("trace_jax.files.os.access", lambda path, mode: path != closed)
    for path in (tmp_path, tmp_path / "new", tmp_path / "new" / "deep", tmp_path / "file"):
        require_writable(path)
    for path, folder in ((closed, closed), (closed / "new" / "deep", closed), (tmp_path / "file" / "new", tmp_path / "file")):
        with pytest.raises(UserError, match=f"{path} cannot be written: {folder} is not a folder that you may write to"):
            require_writable(path)
